/* The system calls shardd lives on, tried: a version number does not tell of seccomp filters or of
 * kernels with parts left out. */
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "client/ctl/doctor/doctor.h"
#include "proto/base/check.h"
#include "proto/spec/layout.h"

static const char upgrade[] = "use Linux 5.3 or later; in a container, allow this system call";

/* A page sealed as the board is: what was writable stays so, no new mapping is. */
static bool try_seals(int fd)
{
    return ftruncate(fd, SHD_PAGE_BYTES) == 0 &&
           fcntl(fd, F_ADD_SEALS,
                 F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) == 0;
}

/* Wait on a page that can only be read, for a value it does not have: comes back at once. */
static bool try_futex(int fd)
{
    void *page = mmap(NULL, SHD_PAGE_BYTES, PROT_READ, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED)
        return false;
    const long r = syscall(SYS_futex, page, FUTEX_WAIT, 1, NULL, NULL, 0);
    const bool works = r < 0 && errno == EAGAIN;
    munmap(page, SHD_PAGE_BYTES);
    return works;
}

static bool try_write_refused(int fd)
{
    void *page = mmap(NULL, SHD_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED)
        return errno == EPERM;
    munmap(page, SHD_PAGE_BYTES);
    return false;
}

static bool try_pidfd(int fd)
{
    (void)fd;
    const int pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0);
    if (pidfd >= 0)
        close(pidfd);
    return pidfd >= 0;
}

void doctor_kernel(struct doctor *d)
{
    static const struct {
        const char *name;
        bool (*works)(int fd); /* in this order, on one memfd */
    } features[] = {
        { "memfd seals with F_SEAL_FUTURE_WRITE", try_seals },
        { "futex on a read-only page", try_futex },
        { "F_SEAL_FUTURE_WRITE refuses writable mappings", try_write_refused },
        { "pidfd_open", try_pidfd },
    };
    struct utsname u;
    if (uname(&u) < 0)
        snprintf(u.release, sizeof(u.release), "?");
    const int fd = memfd_create("shardctl-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) {
        doctor_fail(d, upgrade, "Linux %.60s: memfd_create: %s", u.release, strerror(errno));
        return;
    }
    unsigned missing = 0;
    for (size_t i = 0; i < ARRAY_SIZE(features); i++) {
        if (features[i].works(fd))
            continue;
        missing++;
        doctor_fail(d, upgrade, "Linux %.60s: no %s", u.release, features[i].name);
    }
    close(fd);
    if (missing == 0)
        doctor_ok(d, "Linux %.60s: sealed memfd, futex on shared pages and pidfd work", u.release);
}
