/* What daemons say to shardctl as their service manager: any datagrams with any descriptors. What
 * is kept is counted right, and nothing else stays open. Input: messages, each one byte (bits 0..1:
 * descriptors that come along, bits 2..3: of which file, bit 4: the next one's length has two
 * bytes), its length, its text. */
#include "tests/fuzz/fuzz.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "client/ctl/base/say.h"
#include "client/ctl/run/keeper.h"
#include "tests/fuzz/descriptors.h"

#define FILES        3
#define MESSAGES_MAX 64u

static int files[FILES], pair[2] = { -1, -1 };

void ctl_say(const char *fmt, ...)
{
    (void)fmt;
}

static void start(void)
{
    const int on = 1;
    CHECK(socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) == 0);
    CHECK(setsockopt(pair[1], SOL_SOCKET, SO_PASSCRED, &on, sizeof on) == 0);
    for (int i = 0; i < FILES; i++) {
        files[i] = memfd_create("kept", MFD_CLOEXEC);
        CHECK(files[i] >= 0);
    }
}

static void send_message(const uint8_t *text, size_t bytes, unsigned fds, unsigned which)
{
    int chosen[FUZZ_FDS_MAX];
    for (unsigned i = 0; i < FUZZ_FDS_MAX; i++)
        chosen[i] = files[(which + i) % FILES];
    fuzz_send(pair[0], text, bytes, chosen, fds);
}

static void check_kept(const struct kept *kept)
{
    struct shd_err e = { 0 };
    char *names;
    size_t bytes = 0;
    CHECK(kept->count <= KEPT_FDS_MAX && kept->names_bytes <= KEPT_NAMES_BYTES_MAX);
    for (uint32_t i = 0; i < kept->count; i++) {
        bytes += strlen(kept->names[i]) + 1;
        CHECK(kept->names[i][0] != 0 && strchr(kept->names[i], ':') == NULL);
        CHECK((fcntl(kept->fds[i], F_GETFD) & FD_CLOEXEC) != 0);
    }
    CHECK(bytes == kept->names_bytes);
    CHECK(keeper_names(kept, &names, &e) == SHD_OK);
    CHECK(strlen(names) + (kept->count > 0) == bytes);
    free(names);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct notify_message m;
    struct fuzz_in in = { data, size };
    struct kept kept = { 0 };
    if (pair[0] < 0)
        start();
    const int low = fuzz_lowest_free(pair[0]);
    for (unsigned n = 0; in.left > 0 && n < MESSAGES_MAX; n++) {
        const uint8_t how = fuzz_u8(&in);
        size_t bytes = (size_t)fuzz_bytes(&in, (how & 16) != 0 ? 2 : 1);
        if (bytes > in.left)
            bytes = in.left;
        send_message(in.at, bytes, how & 3, how >> 2 & 3);
        in.at += bytes;
        in.left -= bytes;
        if (notify_take(pair[1], &m) == 1) {
            CHECK(m.pid == getpid() && m.fd_count == (how & 3));
            keeper_take(&kept, &m, "cpu0");
            notify_close(&m);
        }
    }
    check_kept(&kept);
    keeper_free(&kept);
    CHECK(fuzz_lowest_free(pair[0]) == low);
    return 0;
}

size_t fuzz_seed(unsigned index, uint8_t *buf, size_t bytes_max)
{
    static const char *const texts[] = {
        "FDSTORE=1\nFDNAME=m0123-state\nFDPOLL=0",
        "FDSTORE=1\nFDNAME=m0123-ledger",
        "FDSTOREREMOVE=1\nFDNAME=m0123-state",
        "READY=1\nSTATUS=Serving",
        "BARRIER=1",
        "FDSTORE=1",
    };
    size_t size = 0;
    if (index >= ARRAY_SIZE(texts))
        return 0;
    for (unsigned i = 0; i <= index; i++) { /* one more message each */
        const size_t bytes = strlen(texts[i]);
        if (size + 2 + bytes > bytes_max)
            return 0;
        buf[size] = (uint8_t)(i % 3 == 2 ? 0 : 1 | i << 2);
        buf[size + 1] = (uint8_t)bytes;
        memcpy(buf + size + 2, texts[i], bytes);
        size += 2 + bytes;
    }
    return size;
}
