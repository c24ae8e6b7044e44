/* See reserve.h. */
#include "proto/share/reserve.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdbool.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/base/memory.h"
#include "proto/base/sys.h"
#include "proto/spec/layout.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1; older C libraries do not name it */
#endif

#define LOOK_US 2000u

static pthread_mutex_t threads = PTHREAD_MUTEX_INITIALIZER; /* flock() is one for all of them */
static const char *lock_dir;
static int lock_fd = -1; /* of lock_dir, from the first lock on */

void reserve_share(const char *dir)
{
    lock_dir = dir;
}

void reserve_lock(void)
{
    pthread_mutex_lock(&threads);
    if (lock_fd < 0 && lock_dir != NULL)
        lock_fd = open(lock_dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    for (uint64_t us = 0; lock_fd >= 0 && us < RESERVE_PATIENCE_MS * UINT64_C(1000);
         us += LOOK_US) {
        if (flock(lock_fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK)
            return;
        usleep(LOOK_US);
    }
}

void reserve_unlock(void)
{
    if (lock_fd >= 0)
        flock(lock_fd, LOCK_UN);
    pthread_mutex_unlock(&threads);
}

int reserve_check(uint64_t bytes, uint64_t spared, struct shd_err *e)
{
    const struct memory_room room = memory_room();
    const uint64_t tables = bytes / 256; /* page tables, here and of a worker that maps it */
    char text[MEMORY_TEXT_BYTES];
    if (bytes <= room.bytes && tables + spared <= room.bytes - bytes)
        return SHD_OK;
    return err_set(e, SHD_ENOMEM, "%" PRIu64 " MiB are needed (and %" PRIu64 " MiB spared), %s",
                   (bytes >> 20) + 1, (tables + spared) >> 20, memory_room_text(&room, text));
}

static int take_piece(int fd, uint64_t offset_bytes, uint64_t bytes, struct shd_err *e)
{
    int r;
    do
        r = sys_fallocate(fd, 0, (off_t)offset_bytes, (off_t)bytes);
    while (r != 0 && errno == EINTR);
    if (r == 0)
        return SHD_OK;
    return err_sys(e, errno == ENOSPC ? SHD_ENOMEM : SHD_EIO, "take %" PRIu64 " bytes of memory",
                   bytes);
}

/* Those of a piece in huge pages, as far as there are: the kernel gives a memfd none by itself, as
 * hosts are set up (transparent_hugepage/shmem_enabled: never), but where it is asked. Not an error
 * where it has none: the pages are then taken as small ones. False: do not ask again. */
static bool take_huge(int fd, uint64_t at, uint64_t bytes, struct reserve_huge *huge)
{
    const uint64_t whole = bytes / RESERVE_HUGE * RESERVE_HUGE;
    /* A page in each: one without any is taken for one that was cut off. */
    for (uint64_t i = 0; i < whole; i += RESERVE_HUGE)
        if (sys_fallocate(fd, 0, (off_t)(at + i), SHD_PAGE_BYTES) != 0)
            return false;
    if (whole == 0 || madvise((char *)huge->base + at, whole, MADV_COLLAPSE) != 0)
        return false;
    huge->bytes += whole;
    return true;
}

int reserve_pages(int fd, uint64_t offset_bytes, uint64_t bytes, struct reserve_huge *huge,
                  struct shd_err *e)
{
    CHECK(huge == NULL || (offset_bytes == 0 && (uintptr_t)huge->base % RESERVE_HUGE == 0));
    bool ask = huge != NULL;
    for (uint64_t at = 0; at < bytes; at += RESERVE_PIECE) {
        const uint64_t piece = bytes - at < RESERVE_PIECE ? bytes - at : RESERVE_PIECE;
        int r = reserve_check(bytes - at, RESERVE_SPARED_MIN, e);
        if (r != SHD_OK)
            return r;
        ask = ask && take_huge(fd, at, piece, huge);
        r = take_piece(fd, offset_bytes + at, piece, e);
        if (r != SHD_OK)
            return r;
    }
    return SHD_OK;
}
