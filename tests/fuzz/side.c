/* The side channel: any datagram with any descriptors. What side_recv() takes keeps its promises,
 * and no descriptor is left behind. Input: one byte (bits 0..1: descriptors that come along, bit 2:
 * the receiver wants none), then the datagram. */
#include "tests/fuzz/fuzz.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/share/fdpass.h"
#include "proto/share/segment.h"
#include "tests/fuzz/descriptors.h"

static void check_taken(const struct side_msg *m, int got, unsigned fds)
{
    CHECK(m->magic == SIDE_MAGIC && m->protocol == SHD_PROTOCOL && m->reserved == 0);
    CHECK(m->type >= SIDE_WELCOME && m->type <= SIDE_ERROR);
    CHECK(memchr(m->text, 0, sizeof m->text) != NULL);
    CHECK((got >= 0) == (fds > 0));
    if (m->type == SIDE_SEGMENT)
        CHECK(got >= 0 && segment_kind_shared(m->kind));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int pair[2] = { -1, -1 };
    struct shd_err e = { 0 };
    struct side_msg m;
    int got = -1;
    if (pair[0] < 0)
        CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    if (size < 2 || size > 4096) /* an empty datagram reads as the end */
        return 0;
    const unsigned fds = data[0] & 3;
    const bool wanted = (data[0] & 4) == 0;
    const int low = fuzz_lowest_free(pair[0]);
    fuzz_send(pair[0], data + 1, size - 1, (const int[]){ pair[0], pair[0], pair[0] }, fds);
    const int r = side_recv(pair[1], /* timeout_ms= */ -1, &m, wanted ? &got : NULL, &e);
    if (r == SHD_OK)
        check_taken(&m, wanted ? got : (int)fds - 1, fds);
    else
        fuzz_check_refusal(r, &e);
    if (got >= 0) {
        CHECK((fcntl(got, F_GETFD) & FD_CLOEXEC) != 0);
        close(got);
    }
    CHECK(fuzz_lowest_free(pair[0]) == low);
    return 0;
}

size_t fuzz_seed(unsigned index, uint8_t *buf, size_t bytes_max)
{
    struct side_msg m = { .magic = SIDE_MAGIC,
                          .protocol = SHD_PROTOCOL,
                          .type = SIDE_WELCOME + index % 4,
                          .ticket = 7,
                          .bytes = 4096,
                          .kind = SEGMENT_PUBLISH,
                          .text = "no such ticket" };
    if (m.type == SIDE_ERROR)
        m.status = SHD_ENOENT;
    if (index >= 8 || bytes_max < sizeof m + 1)
        return 0;
    buf[0] = (uint8_t)((index & 4) | (m.type == SIDE_SEGMENT));
    memcpy(buf + 1, &m, sizeof m);
    return sizeof m + 1;
}

#ifdef SHD_FUZZ
/* Mostly leave what every message begins with as it must be. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max, unsigned seed)
{
    static const uint32_t head[2] = { SIDE_MAGIC, SHD_PROTOCOL };
    size = LLVMFuzzerMutate(data, size, max);
    if (seed % 8 != 0 && size > sizeof head)
        memcpy(data + 1, head, sizeof head);
    if (seed % 4 != 0 && max > sizeof(struct side_msg)) {
        if (size < sizeof(struct side_msg) + 1)
            memset(data + size, 0, sizeof(struct side_msg) + 1 - size);
        size = sizeof(struct side_msg) + 1;
    }
    return size;
}
#endif
