/* What every fuzz target has, and how it reads its input.
 *
 * All targets are one program, with a table of them in fuzz.c. Built with libFuzzer (preset fuzz)
 * it searches; built without it runs a target's seeds and its corpus, as a unit test. What must
 * hold is said with CHECK(): a failed one aborts, which libFuzzer reports.
 */
#ifndef SHD_TESTS_FUZZ_H
#define SHD_TESTS_FUZZ_H

#include <fcntl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/base/status.h"

struct fuzz_target {
    const char *name;
    int (*input)(const uint8_t *data, size_t size); /* returns 0 */
    /* The index-th valid input into buf; returns its size, 0 when there are no more. */
    size_t (*seed)(unsigned index, uint8_t *buf, size_t bytes_max);
    /* Change data[size], at most max bytes afterwards; returns the new size. NULL: fuzz_mutate().
     */
    size_t (*mutate)(uint8_t *data, size_t size, size_t max, unsigned seed);
};

extern const struct fuzz_target fuzz_wire, fuzz_side, fuzz_board, fuzz_spec, fuzz_safetensors,
    fuzz_text, fuzz_keeper, fuzz_plan, fuzz_ledger, fuzz_trail, fuzz_zmtp, fuzz_ring, fuzz_relay,
    fuzz_planfile, fuzz_replicas;

#define FUZZ_SEED_BYTES_MAX ((size_t)1 << 16)

/* libFuzzer's own mutation; without libFuzzer none. */
size_t fuzz_mutate(uint8_t *data, size_t size, size_t max);

/* An input read from front to back; behind its end everything is 0. */
struct fuzz_in {
    const uint8_t *at;
    size_t left;
};

static inline uint64_t fuzz_bytes(struct fuzz_in *in, size_t bytes)
{
    uint64_t value = 0;
    const size_t n = bytes < in->left ? bytes : in->left;
    for (size_t i = 0; i < n; i++)
        value |= (uint64_t)in->at[i] << (8 * i);
    in->at += n;
    in->left -= n;
    return value;
}
static inline uint8_t fuzz_u8(struct fuzz_in *in)
{
    return (uint8_t)fuzz_bytes(in, 1);
}
static inline uint32_t fuzz_u32(struct fuzz_in *in)
{
    return (uint32_t)fuzz_bytes(in, 4);
}
static inline uint64_t fuzz_u64(struct fuzz_in *in)
{
    return fuzz_bytes(in, 8);
}
static inline uint32_t fuzz_below(struct fuzz_in *in, uint32_t limit)
{
    return (uint32_t)(fuzz_bytes(in, limit > 256 ? 4 : 1) % limit);
}

/* What every refusal has. */
static inline void fuzz_check_refusal(int r, const struct shd_err *e)
{
    CHECK(r < 0 && status_known(r) && e->code == r);
    CHECK(e->text[0] != 0 && memchr(e->text, 0, sizeof e->text) != NULL);
}

/* For the targets whose input comes with descriptors. */

#define FUZZ_FDS_MAX 3u

/* Send data[size] to fd's other end, with the first `count` of fds. */
static inline void fuzz_send(int fd, const uint8_t *data, size_t size, const int fds[FUZZ_FDS_MAX],
                             unsigned count)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(FUZZ_FDS_MAX * sizeof(int))];
    } control = { 0 };
    struct iovec iov = { .iov_base = (void *)(uintptr_t)data, .iov_len = size };
    struct msghdr h = { .msg_iov = &iov, .msg_iovlen = 1 };
    CHECK(count <= FUZZ_FDS_MAX);
    if (count > 0) {
        h.msg_control = control.bytes;
        h.msg_controllen = CMSG_SPACE(count * sizeof(int));
        struct cmsghdr *c = CMSG_FIRSTHDR(&h);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(count * sizeof(int));
        memcpy(CMSG_DATA(c), fds, count * sizeof(int));
    }
    CHECK(sendmsg(fd, &h, 0) == (ssize_t)size);
}

/* The lowest free descriptor: the same before and after when none stays open. fd: an open one. */
static inline int fuzz_lowest_free(int fd)
{
    const int low = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    CHECK(low >= 0);
    close(low);
    return low;
}

#endif
