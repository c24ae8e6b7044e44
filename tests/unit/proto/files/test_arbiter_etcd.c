/* An arbiter that is an etcd: a real one, which is killed, stopped and written to by others; and
 * servers that are none. */
#include "proto/files/arbiter_etcd.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <ftw.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <openssl/evp.h>

#include "proto/base/check.h"
#include "proto/files/arbiter.h"
#include "proto/files/arbiter_http.h"
#include "tests/lib/arbiter_race.h"
#include "tests/lib/child.h"
#include "tests/lib/test.h"

#define CLUSTER "c0ffee"
#define PREFIX  "shardd/arbiter"

static char dir[64], url[64], peer[64], text[128];
static pid_t etcd;

/* -- The real one ------------------------------------------------------------------------------ */

/* Bound and let go: nobody else takes it so soon. */
static uint32_t free_port(void)
{
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr = { htonl(INADDR_LOOPBACK) } };
    socklen_t bytes = sizeof at;
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0 && bind(fd, (struct sockaddr *)&at, sizeof at) == 0);
    CHECK(getsockname(fd, (struct sockaddr *)&at, &bytes) == 0);
    close(fd);
    return ntohs(at.sin_port);
}

static void start_etcd(void)
{
    etcd = test_fork();
    if (etcd != 0)
        return;
    char log[80];
    snprintf(log, sizeof log, "%s/log", dir);
    MUST(freopen("/dev/null", "w", stdout) != NULL && freopen(log, "a", stderr) != NULL);
    execlp("etcd", "etcd", "--name", "only", "--data-dir", dir, "--listen-client-urls", url,
           "--advertise-client-urls", url, "--listen-peer-urls", peer,
           "--initial-advertise-peer-urls", peer, "--initial-cluster",
           (snprintf(text, sizeof text, "only=%s", peer), text), (char *)NULL);
    _exit(127);
}

static void end_etcd(void)
{
    if (etcd <= 0)
        return;
    kill(etcd, SIGKILL);
    waitpid(etcd, NULL, 0);
    etcd = 0;
}

static int remove_entry(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st;
    (void)type;
    (void)ftw;
    return remove(path);
}

static void clean_up(void)
{
    end_etcd();
    if (dir[0] != '\0')
        nftw(dir, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
    dir[0] = '\0';
}

/* It answers. */
static bool is_there(struct arbiter *a)
{
    struct arbiter_view v = { 0 };
    struct shd_err e = { 0 };
    int status;
    const bool there = arbiter_read(a, &v, &e) == SHD_OK;
    arbiter_view_free(&v);
    if (there)
        return true;
    if (waitpid(etcd, &status, WNOHANG) == etcd) {
        etcd = 0;
        FAIL("etcd ended with status 0x%x", (unsigned)status);
    }
    return false;
}

static void begin(struct arbiter **ret_arbiter)
{
    struct shd_err e = { 0 };
    struct statvfs vfs;
    if (system("command -v etcd >/dev/null") != 0)
        SKIP("no etcd here: scripts/install-deps.sh --dev installs it");
    /* In memory, where there is no disk to wait for: calls have an end of their own. An etcd takes
     * 64 MiB at once. */
    const bool shm = access("/dev/shm", W_OK) == 0 && statvfs("/dev/shm", &vfs) == 0 &&
                     vfs.f_bavail * vfs.f_frsize >= UINT64_C(256) << 20;
    snprintf(dir, sizeof dir, "%s/shd-etcd-XXXXXX", shm ? "/dev/shm" : "/tmp");
    CHECK(mkdtemp(dir) != NULL);
    test_clean_up = clean_up;
    snprintf(url, sizeof url, "http://127.0.0.1:%u", free_port());
    snprintf(peer, sizeof peer, "http://127.0.0.1:%u", free_port());
    start_etcd();
    snprintf(text, sizeof text, "etcd:%s/" PREFIX, url);
    EXPECT_OK(arbiter_open(text, CLUSTER, ret_arbiter, &e), &e);
    EXPECT_SOON(is_there(*ret_arbiter));
}

static int claim_one(struct arbiter *a, uint64_t number, const char *host, struct shd_err *e)
{
    char out[1][ARBITER_NAME_BYTES];
    const struct arbiter_view v = { .number = number, .out_count = 1, .out = out };
    snprintf(out[0], sizeof out[0], "%s", host);
    return arbiter_claim(a, &v, e);
}

static uint64_t newest(struct arbiter *a)
{
    struct arbiter_view v = { 0 };
    struct shd_err e = { 0 };
    EXPECT_OK(arbiter_read(a, &v, &e), &e);
    const uint64_t number = v.number;
    arbiter_view_free(&v);
    return number;
}

TEST(views_follow_each_other)
{
    struct shd_err e = { 0 };
    struct arbiter_view v = { 0 };
    struct arbiter *arbiter, *other, *third;
    begin(&arbiter);
    EXPECT_OK(arbiter_open(text, CLUSTER, &other, &e), &e);
    EXPECT_OK(arbiter_open(text, "c0ffe", &third, &e), &e);
    EXPECT_EQ(newest(arbiter), 0);
    EXPECT_STATUS(claim_one(arbiter, 2, "b", &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "view 2 cannot follow view 0, the newest of key 'shardd/arbiter/c0ffee'");
    EXPECT_OK(claim_one(arbiter, 1, "b", &e), &e);
    EXPECT_STATUS(claim_one(other, 1, "a", &e), SHD_EBUSY);
    EXPECT_HAS(e.text, "view 1 is another's");
    EXPECT_OK(claim_one(other, 2, "a", &e), &e);
    EXPECT_STATUS(claim_one(arbiter, 1, "c", &e), SHD_EBUSY);
    EXPECT_HAS(e.text, "the newest is 2");
    EXPECT_OK(arbiter_read(arbiter, &v, &e), &e);
    EXPECT(v.number == 2 && v.out_count == 1 && strcmp(v.out[0], "a") == 0);
    arbiter_view_free(&v);
    EXPECT_EQ(newest(third), 0);
    /* The largest view there is. */
    v = (struct arbiter_view){ .number = 1, .out_count = ARBITER_HOSTS_MAX };
    v.out = calloc(v.out_count, sizeof *v.out);
    for (uint32_t i = 0; i < v.out_count; i++)
        snprintf(v.out[i], sizeof v.out[i], "%063" PRIu32, i);
    EXPECT_OK(arbiter_claim(third, &v, &e), &e);
    struct arbiter_view got = { 0 };
    EXPECT_OK(arbiter_read(third, &got, &e), &e);
    EXPECT(got.out_count == v.out_count &&
           memcmp(got.out, v.out, v.out_count * sizeof *v.out) == 0);
    arbiter_view_free(&got);
    arbiter_view_free(&v);
    arbiter_close(third);
    arbiter_close(other);
    arbiter_close(arbiter);
    clean_up();
}

TEST(one_of_eight_processes_makes_each_view)
{
    struct arbiter *arbiter;
    begin(&arbiter);
    expect_one_makes_each_view(text, CLUSTER, 40);
    EXPECT_EQ(newest(arbiter), 40);
    arbiter_close(arbiter);
    clean_up();
}

TEST(one_that_is_killed_or_stopped_has_the_view_when_it_is_back)
{
    struct shd_err e = { 0 };
    struct arbiter_view v = { 0 };
    struct arbiter *arbiter;
    begin(&arbiter);
    EXPECT_OK(claim_one(arbiter, 1, "b", &e), &e);
    int status;
    /* kill() returns before all threads have stopped. */
    CHECK(kill(etcd, SIGSTOP) == 0 && waitpid(etcd, &status, WUNTRACED) == etcd);
    EXPECT(WIFSTOPPED(status));
    EXPECT_STATUS(arbiter_read(arbiter, &v, &e), SHD_ETIMEDOUT);
    EXPECT_STATUS(claim_one(arbiter, 2, "late", &e), SHD_ETIMEDOUT); /* which may come true */
    CHECK(kill(etcd, SIGCONT) == 0);
    EXPECT_SOON(is_there(arbiter));
    EXPECT_SOON(claim_one(arbiter, newest(arbiter) + 1, "c", &e) == SHD_OK);
    const uint64_t last = newest(arbiter);
    EXPECT(last == 2 || last == 3);
    end_etcd();
    EXPECT_STATUS(arbiter_read(arbiter, &v, &e), SHD_EGONE);
    EXPECT_HAS(e.text, "nobody listens at http://127.0.0.1:");
    EXPECT_STATUS(claim_one(arbiter, last + 1, "d", &e), SHD_EGONE);
    start_etcd();
    EXPECT_SOON(is_there(arbiter));
    EXPECT_EQ(newest(arbiter), last);
    EXPECT_OK(claim_one(arbiter, last + 1, "d", &e), &e);
    arbiter_close(arbiter);
    clean_up();
}

/* As `etcdctl put KEY VALUE` does, or `del`. */
static void write_key(const char *path, const char *value)
{
    char key64[128], value64[512], body[1024], whole[128], *answer = NULL;
    struct shd_err e = { 0 };
    bool sent;
    size_t bytes;
    EVP_EncodeBlock((unsigned char *)key64, (const unsigned char *)PREFIX "/" CLUSTER,
                    (int)strlen(PREFIX "/" CLUSTER));
    EVP_EncodeBlock((unsigned char *)value64, (const unsigned char *)value, (int)strlen(value));
    snprintf(body, sizeof body,
             value[0] != '\0' ? "{\"key\":\"%s\",\"value\":\"%s\"}" : "{\"key\":\"%s\"}", key64,
             value64);
    snprintf(whole, sizeof whole, "%s%s", url, path);
    const struct arbiter_post post = { whole, body, 4096, (long)TEST_HANG_MS, (long)TEST_HANG_MS };
    EXPECT_OK(arbiter_http_post(&post, &answer, &bytes, &sent, &e), &e);
    EXPECT(sent);
    free(answer);
}

TEST(key_that_others_have_written_is_refused)
{
    static const char five[] = "{\"schema\":1,\"cluster\":\"c0ffee\",\"view\":5,\"out\":[]}";
    struct shd_err e = { 0 };
    struct arbiter_view v = { 0 };
    struct arbiter *arbiter;
    begin(&arbiter);
    EXPECT_OK(claim_one(arbiter, 1, "b", &e), &e);
    write_key("/v3/kv/put", "hello");
    EXPECT_STATUS(arbiter_read(arbiter, &v, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "etcd's key 'shardd/arbiter/c0ffee' has no view: line 1");
    EXPECT_STATUS(claim_one(arbiter, 2, "b", &e), SHD_EBUSY);
    write_key("/v3/kv/put", five);
    EXPECT_STATUS(arbiter_read(arbiter, &v, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "has version 3 and says that it is view 5");
    write_key("/v3/kv/deleterange", "");
    EXPECT_EQ(newest(arbiter), 0);
    EXPECT_OK(claim_one(arbiter, 1, "b", &e), &e);
    EXPECT_EQ(newest(arbiter), 1);
    arbiter_close(arbiter);
    clean_up();
}

TEST(other_members_are_asked_where_one_is_gone)
{
    char several[256];
    struct shd_err e = { 0 };
    struct arbiter *arbiter, *alone;
    begin(&alone);
    snprintf(several, sizeof several, "etcd:http://127.0.0.1:%u,http://[::1]:%u,%s/" PREFIX,
             free_port(), free_port(), url);
    EXPECT_OK(arbiter_open(several, CLUSTER, &arbiter, &e), &e);
    EXPECT_OK(claim_one(arbiter, 1, "b", &e), &e);
    EXPECT_EQ(newest(arbiter), 1);
    EXPECT_EQ(newest(alone), 1);
    EXPECT_STATUS(claim_one(arbiter, 1, "b", &e), SHD_EBUSY);
    end_etcd();
    struct arbiter_view v = { 0 };
    EXPECT_STATUS(arbiter_read(arbiter, &v, &e), SHD_EGONE);
    arbiter_close(arbiter);
    arbiter_close(alone);
    clean_up();
}

/* -- Servers that are none --------------------------------------------------------------------- */

/* Hears each request, answers it with the same bytes, and hangs up. */
static pid_t serve(const char *answer, uint32_t *ret_port)
{
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr = { htonl(INADDR_LOOPBACK) } };
    socklen_t bytes = sizeof at;
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0 && bind(fd, (struct sockaddr *)&at, sizeof at) == 0 && listen(fd, 8) == 0);
    CHECK(getsockname(fd, (struct sockaddr *)&at, &bytes) == 0);
    *ret_port = ntohs(at.sin_port);
    const pid_t pid = test_fork();
    if (pid != 0) {
        close(fd);
        return pid;
    }
    for (;;) {
        char request[4096];
        const int one = accept(fd, NULL, NULL);
        MUST(one >= 0 && read(one, request, sizeof request) > 0);
        const size_t length = strlen(answer);
        if (write(one, answer, length) != (ssize_t)length)
            fprintf(stderr, "the client has hung up\n");
        shutdown(one, SHUT_WR);
        while (read(one, request, sizeof request) > 0)
            continue;
        close(one);
    }
}

#define JSON(body)   "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n" body
#define KV(version)  "{\"header\":{},\"kvs\":[{\"value\":\"aGVsbG8=\",\"version\":" version "}]}"
#define VALUE(value) "{\"header\":{},\"kvs\":[{\"value\":\"" value "\",\"version\":\"1\"}]}"

TEST(servers_that_are_no_etcd_are_refused)
{
    static const struct {
        const char *answer;
        int code;
        const char *says;
    } wrong[] = {
        { "hello\r\n", SHD_EPROTO, "does not answer in HTTP" },
        { "HTTP/1.1 200 OK\r\n\r\n", SHD_EPROTO, "no JSON object" },
        { JSON("[]"), SHD_EPROTO, "no JSON object" },
        { JSON("{}"), SHD_EPROTO, "no header" },
        { JSON("{\"header\":{},\"kvs\":{}}"), SHD_EPROTO, "no one version and value" },
        { JSON("{\"header\":{},\"kvs\":[{},{}]}"), SHD_EPROTO, "no one version and value" },
        { JSON(KV("1")), SHD_EPROTO, "no one version and value" },
        { JSON(KV("\"0\"")), SHD_EPROTO, "no one version and value" },
        { JSON(KV("\"-1\"")), SHD_EPROTO, "no one version and value" },
        { JSON(KV("\"99999999999999999999\"")), SHD_EPROTO, "no one version and value" },
        { JSON(KV("\"1\"")), SHD_EINVAL, "has no view: line 1" },
        { JSON(VALUE("")), SHD_EINVAL, "no text of a view" },
        { JSON(VALUE("=")), SHD_EINVAL, "no text of a view" },
        { JSON(VALUE("====")), SHD_EINVAL, "has no view" },
        { JSON(VALUE("a*b=")), SHD_EINVAL, "no text of a view" },
        { "HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}", SHD_EPROTO, "does not answer" },
        { "HTTP/1.1 302 Found\r\nLocation: /\r\n\r\n", SHD_EIO, "answers with HTTP 302" },
        { "HTTP/1.1 401 No\r\n\r\n{\"error\":\"no \x1b[1m\"}", SHD_EAUTH,
          "HTTP 401: {\"error\":\"no  [" },
        { "HTTP/1.1 503 No\r\n\r\n{\"error\":\"no leader\"}", SHD_EIO,
          "HTTP 503: {\"error\":\"no leader" },
    };
    struct shd_err e = { 0 };
    struct arbiter_view v = { 0 };
    struct arbiter *a;
    for (size_t i = 0; i < ARRAY_SIZE(wrong); i++) {
        uint32_t port;
        const pid_t pid = serve(wrong[i].answer, &port);
        snprintf(text, sizeof text, "etcd:http://127.0.0.1:%u/x", port);
        EXPECT_OK(arbiter_open(text, CLUSTER, &a, &e), &e);
        const int r = arbiter_read(a, &v, &e);
        arbiter_close(a);
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        if (r != wrong[i].code || strstr(e.text, wrong[i].says) == NULL)
            FAIL("%s: %s: %s", wrong[i].answer, status_name(r), e.text);
    }
}

TEST(answer_without_end_and_claims_that_are_not_answered)
{
    static char endless[400000];
    struct shd_err e = { 0 };
    struct arbiter_view v = { 0 };
    struct arbiter *a;
    uint32_t port;
    const int head = snprintf(endless, sizeof endless, JSON("{\"header\":\""));
    memset(endless + head, 'x', sizeof endless - (size_t)head - 1);
    pid_t pid = serve(endless, &port);
    snprintf(text, sizeof text, "etcd:http://127.0.0.1:%u/x", port);
    EXPECT_OK(arbiter_open(text, CLUSTER, &a, &e), &e);
    EXPECT_STATUS(arbiter_read(a, &v, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "the answer is longer than 262144 bytes");
    arbiter_close(a);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    /* What may have been heard is not asked of another member: it would be a claim more. */
    pid = serve("", &port);
    uint32_t second_port;
    const pid_t second = serve(JSON("{\"header\":{},\"succeeded\":true}"), &second_port);
    snprintf(text, sizeof text, "etcd:http://127.0.0.1:%u,http://127.0.0.1:%u/x", port,
             second_port);
    EXPECT_OK(arbiter_open(text, CLUSTER, &a, &e), &e);
    EXPECT_STATUS(claim_one(a, 1, "b", &e), SHD_EPROTO);
    EXPECT_OK(claim_one(a, 1, "b", &e), &e); /* the next call begins with the other one */
    arbiter_close(a);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    kill(second, SIGKILL);
    waitpid(second, NULL, 0);
}

TEST(texts_that_name_no_etcd_are_refused)
{
    static const char *const wrong[] = {
        "etcd:",
        "etcd:127.0.0.1:2379/x",
        "etcd:http://",
        "etcd:http:///x",
        "etcd:http://a:2379",
        "etcd:http://a:2379/",
        "etcd:http://a:2379/x?y",
        "etcd:http://a:2379/x y",
        "etcd:http://user:word@a:2379/x",
        "etcd:ftp://a:2379/x",
        "etcd:http://a:2379,/x",
        "etcd:http://a:2379,b:2379/x",
        "etcd:http://a:2379/x,http://b:2379/x",
    };
    struct shd_err e = { 0 };
    struct arbiter *a;
    for (size_t i = 0; i < ARRAY_SIZE(wrong); i++) {
        const int r = arbiter_open(wrong[i], CLUSTER, &a, &e);
        if (r != SHD_EINVAL || strstr(e.text, "is not etcd:http://HOST:PORT/PREFIX") == NULL)
            FAIL("%s: %s: %s", wrong[i], status_name(r), e.text);
    }
    char many[512] = "etcd:http://a:1";
    for (uint32_t i = 0; i < ARBITER_ETCD_URLS_MAX; i++)
        strcat(many, ",http://a:1");
    strcat(many, "/x");
    EXPECT_STATUS(arbiter_open(many, CLUSTER, &a, &e), SHD_ERANGE);
    snprintf(many, sizeof many, "etcd:http://a/%0300d", 0);
    EXPECT_STATUS(arbiter_open(many, CLUSTER, &a, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "a prefix of 300 bytes");
    snprintf(many, sizeof many, "etcd:http://%0300d/x", 0);
    EXPECT_STATUS(arbiter_open(many, CLUSTER, &a, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "addresses of 255 bytes");
}

TEST_MAIN()
