/* For the targets whose input comes with descriptors. */
#ifndef SHD_FUZZ_DESCRIPTORS_H
#define SHD_FUZZ_DESCRIPTORS_H

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/fuzz/fuzz.h"

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
