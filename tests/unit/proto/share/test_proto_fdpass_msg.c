/* The side channel's messages: what must not be believed, descriptors that must not leak, peers
 * that are slow or leave. */
#include "proto/share/fdpass.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/share/segment.h"
#include "tests/lib/proto_util.h"
#include "tests/lib/test.h"

/* -- Messages that must not be believed ------------------------------------------------------ */

static void send_raw(int fd, const void *bytes, size_t count, const int *pass, size_t pass_count)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int) * 32)];
    } control = { 0 };
    struct iovec data = { .iov_base = (void *)bytes, .iov_len = count };
    struct msghdr h = { .msg_iov = &data, .msg_iovlen = 1 };
    if (pass_count > 0) {
        h.msg_control = control.bytes;
        h.msg_controllen = CMSG_SPACE(sizeof(int) * pass_count);
        struct cmsghdr *c = CMSG_FIRSTHDR(&h);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int) * pass_count);
        memcpy(CMSG_DATA(c), pass, sizeof(int) * pass_count);
    }
    EXPECT(sendmsg(fd, &h, MSG_NOSIGNAL) == (ssize_t)count);
}

/* A message of `bytes` bytes with a descriptor is refused; nothing is kept or changed. */
static void expect_refused(const struct side_msg *m, size_t bytes, const char *text)
{
    int fds[2], got = -5;
    struct shd_err e;
    struct side_msg back = { .ticket = 99 };
    pair_new(fds);
    const int before = fds_open();
    char big[1024] = { 0 };
    memcpy(big, m, sizeof *m);
    const int pass = 0;
    send_raw(fds[0], big, bytes, &pass, 1);
    EXPECT_STATUS(side_recv(fds[1], 1000, &back, &got, &e), SHD_EPROTO);
    EXPECT_HAS(e.text, text);
    EXPECT_EQ(got, -5);
    EXPECT_EQ(back.ticket, 99);
    EXPECT_EQ(fds_open(), before);
    pair_free(fds);
}

TEST(messages_with_wrong_fields_are_refused)
{
    const size_t whole = sizeof(struct side_msg);
    struct side_msg m = msg_of(SIDE_CLAIM);
    m.magic++;
    expect_refused(&m, whole, "not shardd's");
    m = msg_of(SIDE_CLAIM);
    m.protocol = 3;
    expect_refused(&m, whole, "peer speaks protocol 3, this side 2");
    m = msg_of(0);
    expect_refused(&m, whole, "type is 0, expected 1 to 5");
    m = msg_of(6);
    expect_refused(&m, whole, "type is 6, expected 1 to 5");
    m = msg_of(SIDE_CLAIM);
    m.reserved = 3;
    expect_refused(&m, whole, "reserved field is 3");
    m = msg_of(SIDE_ERROR);
    m.status = SHD_EBUSY;
    memset(m.text, 'a', sizeof m.text);
    expect_refused(&m, whole, "not terminated");
    m = msg_of(SIDE_ERROR);
    expect_refused(&m, whole, "status 0 is unknown");
    m.status = -1000;
    expect_refused(&m, whole, "status -1000 is unknown");
    m = msg_of(SIDE_SEGMENT);
    expect_refused(&m, whole, "kind is 0, expected 1 to 4");
    m.kind = 5;
    expect_refused(&m, whole, "kind is 5, expected 1 to 4");
}

TEST(messages_of_wrong_size_are_refused)
{
    const struct side_msg m = msg_of(SIDE_CLAIM);
    expect_refused(&m, 1, "message of 1 bytes");
    expect_refused(&m, 7, "message of 7 bytes");
    expect_refused(&m, 8, "has 8 bytes, expected 184");
    expect_refused(&m, sizeof m - 1, "has 183 bytes, expected 184");
    expect_refused(&m, sizeof m + 1, "has 185 bytes, expected 184");
    expect_refused(&m, 1024, "has 1024 bytes, expected 184");
    struct side_msg v2 = m; /* another version may have another size: say which matters */
    v2.protocol = 3;
    expect_refused(&v2, 100, "protocol 3");
}

TEST(segment_without_descriptor_is_refused)
{
    int fds[2], got;
    struct shd_err e;
    struct side_msg m = msg_of(SIDE_SEGMENT);
    m.kind = SEGMENT_INBOX;
    pair_new(fds);
    EXPECT_OK(side_send(fds[0], &m, -1, &e), &e);
    EXPECT_STATUS(side_recv(fds[1], 1000, &m, &got, &e), SHD_EPROTO);
    EXPECT_HAS(e.text, "inbox segment came without descriptor");
    pair_free(fds);
}

TEST(surplus_descriptors_are_closed)
{
    struct shd_err e;
    struct side_msg m = msg_of(SIDE_SEGMENT);
    m.kind = SEGMENT_INBOX;
    const int pass[20] = { 0 };
    const size_t counts[] = { 1, 2, 8, 9, 20 }; /* beyond 8 the kernel drops them itself */
    for (size_t i = 0; i < ARRAY_SIZE(counts); i++) {
        int fds[2], got = -1;
        pair_new(fds);
        const int before = fds_open();
        send_raw(fds[0], &m, sizeof m, pass, counts[i]);
        EXPECT_OK(side_recv(fds[1], 1000, &m, &got, &e), &e);
        EXPECT(got >= 0);
        EXPECT((fcntl(got, F_GETFD) & FD_CLOEXEC) != 0);
        EXPECT_EQ(fds_open(), before + 1);
        close(got);
        EXPECT_EQ(fds_open(), before);
        pair_free(fds);
    }
}

TEST(descriptors_nobody_asked_for_are_closed)
{
    int fds[2];
    struct shd_err e;
    struct side_msg m = msg_of(SIDE_CLAIM);
    pair_new(fds);
    const int before = fds_open(), pass[3] = { 0 };
    send_raw(fds[0], &m, sizeof m, pass, 3);
    EXPECT_OK(side_recv(fds[1], 1000, &m, /* ret_fd= */ NULL, &e), &e);
    EXPECT_EQ(fds_open(), before);
    pair_free(fds);
}

TEST(passed_descriptor_is_not_taken_from_the_sender)
{
    int fds[2], got;
    struct shd_err e;
    struct side_msg m = msg_of(SIDE_CLAIM);
    pair_new(fds);
    const int file = open("/dev/null", O_RDONLY | O_CLOEXEC);
    EXPECT_OK(side_send(fds[0], &m, file, &e), &e);
    EXPECT_OK(side_recv(fds[1], 1000, &m, &got, &e), &e);
    EXPECT(fcntl(file, F_GETFD) >= 0 && got != file);
    close(got);
    close(file);
    pair_free(fds);
}

TEST(every_field_arrives)
{
    int fds[2], got;
    struct shd_err e;
    struct side_msg m = { .type = SIDE_ERROR, /* magic and protocol are side_send()'s */
                          .status = SHD_ENOENT,
                          .ticket = UINT64_MAX,
                          .bytes = UINT64_MAX - 1,
                          .kind = UINT32_MAX,
                          .text = "no such ticket" },
                    back;
    for (unsigned i = 0; i < SHD_TOKEN_BYTES; i++)
        m.token[i] = (uint8_t)(i * 17);
    pair_new(fds);
    EXPECT_OK(side_send(fds[0], &m, -1, &e), &e);
    EXPECT_OK(side_recv(fds[1], 1000, &back, &got, &e), &e);
    m.magic = SIDE_MAGIC;
    m.protocol = SHD_PROTOCOL;
    EXPECT(memcmp(&m, &back, sizeof m) == 0);
    EXPECT_EQ(got, -1);
    pair_free(fds);
}

/* -- Time, and peers that leave -------------------------------------------------------------- */

TEST(receive_ends_at_its_timeout)
{
    int fds[2], got;
    struct shd_err e;
    struct side_msg m;
    pair_new(fds);
    EXPECT_STATUS(side_recv(fds[1], 0, &m, &got, &e), SHD_ETIMEDOUT);
    EXPECT_STATUS(side_recv(fds[1], 20, &m, &got, &e), SHD_ETIMEDOUT);
    EXPECT_HAS(e.text, "within 20 ms");
    EXPECT(fcntl(fds[1], F_SETFL, O_NONBLOCK) == 0);
    EXPECT_STATUS(side_recv(fds[1], -1, &m, &got, &e), SHD_ETIMEDOUT);
    pair_free(fds);
}

TEST(hang_up_is_gone_in_both_directions)
{
    int fds[2], got;
    struct shd_err e;
    struct side_msg m = msg_of(SIDE_CLAIM);
    pair_new(fds);
    EXPECT_OK(side_send(fds[0], &m, -1, &e), &e);
    close(fds[0]);
    EXPECT_OK(side_recv(fds[1], 1000, &m, &got, &e), &e); /* what was sent still counts */
    EXPECT_STATUS(side_recv(fds[1], -1, &m, &got, &e), SHD_EGONE);
    EXPECT_STATUS(side_recv(fds[1], 0, &m, &got, &e), SHD_EGONE);
    EXPECT_STATUS(side_send(fds[1], &m, -1, &e), SHD_EGONE); /* and no SIGPIPE */
    close(fds[1]);
}

/* Linux says that it was reset before it hands out what was sent. */
TEST(last_words_of_who_left_without_reading_all_are_heard)
{
    for (int timeout_ms = 0; timeout_ms <= 1000; timeout_ms += 1000) {
        int fds[2], got;
        struct shd_err e;
        struct side_msg wake = msg_of(SIDE_WAKE), m = msg_of(SIDE_CLAIM);
        pair_new(fds);
        EXPECT_OK(side_send(fds[1], &wake, -1, &e), &e);
        EXPECT_OK(side_send(fds[0], &m, -1, &e), &e);
        close(fds[0]);
        EXPECT_OK(side_recv(fds[1], timeout_ms, &m, &got, &e), &e);
        EXPECT_EQ(m.type, SIDE_CLAIM);
        EXPECT_STATUS(side_recv(fds[1], timeout_ms, &m, &got, &e), SHD_EGONE);
        close(fds[1]);
    }
}

TEST(killed_process_hangs_up)
{
    int fds[2], got;
    struct shd_err e;
    struct side_msg m;
    pair_new(fds);
    fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0)
        for (;;)
            pause();
    close(fds[0]);
    EXPECT_STATUS(side_recv(fds[1], 0, &m, &got, &e), SHD_ETIMEDOUT);
    kill(pid, SIGKILL);
    EXPECT_STATUS(side_recv(fds[1], 20000, &m, &got, &e), SHD_EGONE);
    child_status(pid);
    close(fds[1]);
}

TEST(full_socket_is_busy_not_blocking)
{
    int fds[2], sent = 0;
    struct shd_err e;
    const struct side_msg m = msg_of(SIDE_CLAIM);
    pair_new(fds);
    int r = SHD_OK;
    while (r == SHD_OK && sent < 100000) {
        r = side_send(fds[0], &m, -1, &e);
        sent++;
    }
    EXPECT_STATUS(r, SHD_EBUSY);
    EXPECT(sent > 5);
    pair_free(fds);
}

static int send_errno;

static int fault_send(enum sys_kind kind)
{
    return kind == SYS_SEND ? send_errno : 0;
}

TEST(failed_send_is_an_error)
{
    int fds[2];
    struct shd_err e;
    const struct side_msg m = msg_of(SIDE_CLAIM);
    pair_new(fds);
    for (int i = 0; i < 2; i++) {
        send_errno = i == 0 ? ENOBUFS : ETOOMANYREFS;
        sys_fault = fault_send;
        const int r = side_send(fds[0], &m, -1, &e);
        sys_fault = NULL;
        EXPECT_STATUS(r, i == 0 ? SHD_ENOMEM : SHD_EBUSY);
    }
    EXPECT_HAS(e.text, "passed and not received have reached the limit (ulimit -n)");
    pair_free(fds);
}

TEST(random_messages_never_pass_a_bad_field)
{
    uint64_t seed = test_seed(0x51de);
    int fds[2], accepted = 0;
    pair_new(fds);
    const int before = fds_open(), pass[3] = { 0 };
    for (int i = 0; i < 20000; i++) {
        struct side_msg m = msg_of((uint32_t)(test_random(&seed) % 4) + 1), back;
        m.kind = SEGMENT_INBOX;
        m.status = SHD_EIO;
        uint8_t *bytes = (uint8_t *)&m;
        for (uint64_t k = test_random(&seed) % 4; k > 0; k--)
            bytes[test_random(&seed) % sizeof m] ^= (uint8_t)(1u << test_random(&seed) % 8);
        const size_t size = test_random(&seed) % 4 > 0 ? sizeof m : test_random(&seed) % sizeof m;
        send_raw(fds[0], &m, size, pass, test_random(&seed) % 4);
        int got = -1;
        if (side_recv(fds[1], -1, &back, &got, NULL) == SHD_OK) {
            accepted++;
            EXPECT(back.magic == SIDE_MAGIC && back.protocol == SHD_PROTOCOL);
            EXPECT(back.type >= 1 && back.type <= 5);
            EXPECT(back.text[127] == 0 || memchr(back.text, 0, 128) != NULL);
            if (got >= 0)
                close(got);
        }
    }
    EXPECT(accepted > 1000);
    EXPECT_EQ(fds_open(), before);
    pair_free(fds);
}

TEST_MAIN()
