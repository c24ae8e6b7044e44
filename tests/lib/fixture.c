#include "tests/lib/fixture.h"

#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/daemon.h"
#include "proto/base/check.h"
#include "proto/share/reserve.h"
#include "tests/lib/paired.h"

const char *fixture_device(const struct fixture *f, int index, char name[FIXTURE_DEVICE_BYTES])
{
    if (f->devices[index] != NULL)
        snprintf(name, FIXTURE_DEVICE_BYTES, "%s", f->devices[index]);
    else
        snprintf(name, FIXTURE_DEVICE_BYTES, "cpu%d", index);
    return name;
}

void fixture_serve(const struct fixture *f, int index)
{
    char device[FIXTURE_DEVICE_BYTES];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    log_set_level(getenv("TEST_VERBOSE") != NULL ? LOG_LEVEL_DEBUG : LOG_LEVEL_ERROR);
    umask(0007);
    fixture_device(f, index, device);
    reserve_share(f->dir);
    struct daemon *d;
    struct shd_err e;
    const struct daemon_config config = {
        .device = device,
        .runtime_dir = f->dir,
        .threads = 1,
        .pin = f->pin,
        .homes = { .state = f->state != NULL ? f->state : getenv("SHD_TEST_STATE"),
                   .publish = f->publish != NULL ? f->publish : getenv("SHD_TEST_PUBLISH"),
                   .snapshots = f->snapshots != NULL ? f->snapshots
                                                     : getenv("SHD_TEST_SNAPSHOTS") },
        .quota = f->quota,
    };
    if (daemon_new(&config, &d, &e) != SHD_OK) {
        fprintf(stderr, "daemon %s: %s\n", device, e.text);
        _exit(1);
    }
    if (daemon_run(d) != SHD_OK)
        _exit(1);
    daemon_free(d);
    exit(0); /* the leak checker looks at the daemon too */
}

/* The socket is there a moment before anybody listens on it. */
static bool fixture_listens(const char *path)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    CHECK(strlen(path) < sizeof address.sun_path);
    memcpy(address.sun_path, path, strlen(path));
    const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0);
    const bool listens = connect(fd, (const struct sockaddr *)&address, sizeof address) == 0;
    close(fd);
    return listens;
}

void fixture_wait_up(const struct fixture *f, int index)
{
    char path[sizeof f->dir + 64], device[FIXTURE_DEVICE_BYTES];
    snprintf(path, sizeof path, "%s/%s.sock", f->dir, fixture_device(f, index, device));
    EXPECT_SOON(fixture_listens(path));
}

static const struct fixture *fixture_open; /* the one that runs now */

pid_t fixture_owner;

/* A failed test leaves its daemons behind: end them and remove what they had, at exit. */
static void fixture_sweep(void)
{
    const struct fixture *f = fixture_open;
    if (f == NULL || getpid() != fixture_owner)
        return;
    if (f->keeper > 0) {
        kill(f->keeper, SIGKILL); /* and with it the daemons */
        waitpid(f->keeper, NULL, 0);
        close(f->control);
    }
    for (int i = 0; i < f->count && f->keeper == 0; i++) {
        if (waitpid(f->pids[i], NULL, WNOHANG) != 0)
            continue; /* reaped already: the number may be somebody else's by now */
        kill(f->pids[i], SIGKILL);
        waitpid(f->pids[i], NULL, 0);
    }
    static const char *const suffixes[] = { "sock", "zmq", "lock", "status" };
    for (int i = 0; i < f->count; i++) {
        char path[sizeof f->dir + 64], device[FIXTURE_DEVICE_BYTES];
        for (int k = 0; k < 4; k++) {
            snprintf(path, sizeof path, "%s/%s.%s", f->dir, fixture_device(f, i, device),
                     suffixes[k]);
            unlink(path);
        }
        snprintf(path, sizeof path, "%s/notify%d", f->dir, i);
        unlink(path);
    }
    if (f->paired)
        paired_erase(f);
    rmdir(f->dir);
}

const char *fixture_base(void)
{
    const char *base = getenv("XDG_RUNTIME_DIR");
    if (base == NULL)
        base = geteuid() == 0 ? "/run" : getenv("HOME");
    CHECK(base != NULL);
    return base;
}

/* What the test knows is host a's: [count] daemons that are each held twice. */
static void fixture_make_pairs(struct fixture *f, int count)
{
    char a[FIXTURE_DEVICE_BYTES], b[FIXTURE_DEVICE_BYTES];
    for (int i = 0; i < count; i++) {
        const size_t used = strlen(f->address);
        snprintf(f->address + used, sizeof f->address - used, "%c%s+%s", i == 0 ? '?' : ',',
                 fixture_device(f, i, a), fixture_device(f, count + i, b));
    }
    paired_make(f, 2, count);
}

bool fixture_in_pairs(void)
{
    const char *told = getenv("SHD_TEST_PAIRS");
    return told != NULL && strcmp(told, "1") == 0;
}

/* Returns how many daemons there are to be. */
static int fixture_make_dir(struct fixture *f, int count)
{
    if (fixture_owner == 0)
        atexit(fixture_sweep);
    fixture_sweep(); /* what a test that failed before has left */
    f->paired = f->replicas == FIXTURE_PAIRS ||
                (f->replicas == FIXTURE_AS_TOLD && fixture_in_pairs());
    const int all = f->paired ? 2 * count : count;
    CHECK(all <= FIXTURE_DAEMONS_MAX);
    snprintf(f->dir, sizeof f->dir, "%.200s/shd-test-XXXXXX", fixture_base());
    CHECK(mkdtemp(f->dir) != NULL);
    fixture_owner = getpid();
    fixture_open = f;
    f->count = 0;
    f->keeper = 0;
    snprintf(f->address, sizeof f->address, "%s", f->dir);
    if (f->paired)
        fixture_make_pairs(f, count);
    fflush(stdout);
    return all;
}

void fixture_start(struct fixture *f, int count, void (*in_child)(int index))
{
    const int all = fixture_make_dir(f, count);
    for (int i = 0; i < all; i++) {
        f->pids[i] = fork();
        CHECK(f->pids[i] >= 0);
        if (f->pids[i] == 0) {
            if (in_child != NULL && i < count)
                in_child(i);
            fixture_serve(f, i);
        }
        f->count = i + 1;
    }
    for (int i = 0; i < all; i++)
        fixture_wait_up(f, i);
}

static void fixture_serve_kept(int index)
{
    fixture_serve(fixture_open, index);
}

long fixture_ask(const struct fixture *f, enum keeper_order order, int index, const char *text)
{
    return keeper_ask(f->control, order, index, text, NULL);
}

void fixture_succeed(struct fixture *f, int index, const char *fail)
{
    f->pids[index] = (pid_t)fixture_ask(f, KEEPER_START, index, fail);
}

void fixture_restart(struct fixture *f, int index)
{
    fixture_ask(f, KEEPER_KILL, index, "");
    fixture_succeed(f, index, "");
    fixture_wait_up(f, index);
}

void fixture_start_kept(struct fixture *f, int count, const char *fail)
{
    const int all = fixture_make_dir(f, count);
    f->control = keeper_new(f->dir, all, fixture_serve_kept, &f->keeper);
    for (int i = 0; i < all; i++) {
        fixture_succeed(f, i, i < count ? fail : strchr(fail, ';') != NULL ? ";" : "");
        f->count = i + 1;
    }
    for (int i = 0; i < all; i++)
        fixture_wait_up(f, i);
}

void fixture_stop_keeper(const struct fixture *f)
{
    int status;
    kill(f->keeper, SIGSTOP);
    CHECK(waitpid(f->keeper, &status, WUNTRACED) == f->keeper && WIFSTOPPED(status));
    const int sock = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    CHECK(sock >= 0);
    for (int i = 0; i < f->count; i++) {
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        snprintf(address.sun_path, sizeof address.sun_path, "%.80s/notify%d", f->dir, i);
        while (sendto(sock, "X=1", 3, MSG_DONTWAIT, (const struct sockaddr *)&address,
                      sizeof address) == 3) {
        }
        CHECK(errno == EAGAIN);
    }
    close(sock);
}

static int fixture_end_one(const struct fixture *f, int index)
{
    int status = 0;
    if (f->keeper > 0)
        return (int)fixture_ask(f, KEEPER_TERM, index, "");
    kill(f->pids[index], SIGTERM);
    EXPECT_EQ(waitpid(f->pids[index], &status, 0), f->pids[index]);
    return status;
}

void fixture_stop(struct fixture *f)
{
    for (int i = 0; i < f->count; i++) {
        char path[300], device[FIXTURE_DEVICE_BYTES];
        const int status = fixture_end_one(f, i);
        EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        snprintf(path, sizeof path, "%s/%s.lock", f->dir, fixture_device(f, i, device));
        unlink(path);
        snprintf(path, sizeof path, "%s/%s.sock", f->dir, device);
        if (f->keeper > 0)
            unlink(path); /* left to a successor where there was a model */
    }
    if (f->keeper > 0) {
        close(f->control); /* it ends with this */
        EXPECT_EQ(waitpid(f->keeper, NULL, 0), f->keeper);
        f->keeper = 0;
    }
    if (f->paired)
        paired_erase(f);
    EXPECT_EQ(rmdir(f->dir), 0);
    fixture_open = NULL;
}

int count_fds(pid_t pid)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
    DIR *d = opendir(path);
    CHECK(d != NULL);
    int count = 0;
    while (readdir(d) != NULL)
        count++;
    closedir(d);
    return count;
}

int count_memfds(pid_t pid)
{
    char path[64], link[256];
    snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
    DIR *d = opendir(path);
    CHECK(d != NULL);
    int count = 0;
    for (const struct dirent *entry; (entry = readdir(d)) != NULL;) {
        const ssize_t n = readlinkat(dirfd(d), entry->d_name, link, sizeof link - 1);
        link[n > 0 ? n : 0] = '\0';
        count += strncmp(link, "/memfd:", 7) == 0;
    }
    closedir(d);
    return count;
}

#define MEMFDS_MAX 4096

struct memfds {
    ino_t seen[MEMFDS_MAX];
    int count;
    uint64_t bytes;
};

static void add_memfd(struct memfds *m, const struct stat *st)
{
    for (int i = 0; i < m->count; i++)
        if (m->seen[i] == st->st_ino)
            return;
    CHECK(m->count < MEMFDS_MAX);
    m->seen[m->count++] = st->st_ino;
    m->bytes += (uint64_t)st->st_blocks * 512;
}

uint64_t memfd_bytes(const pid_t *pids, int count)
{
    static struct memfds found;
    char path[64], link[256];
    found.count = 0;
    found.bytes = 0;
    for (int i = 0; i < count; i++) {
        struct stat st;
        snprintf(path, sizeof path, "/proc/%d/fd", (int)pids[i]);
        DIR *d = opendir(path);
        CHECK(d != NULL);
        for (const struct dirent *entry; (entry = readdir(d)) != NULL;) {
            const ssize_t n = readlinkat(dirfd(d), entry->d_name, link, sizeof link - 1);
            link[n > 0 ? n : 0] = '\0';
            if (strncmp(link, "/memfd:", 7) == 0 && fstatat(dirfd(d), entry->d_name, &st, 0) == 0)
                add_memfd(&found, &st);
        }
        closedir(d);
    }
    return found.bytes;
}

int count_segment_maps(pid_t pid)
{
    char path[64], line[512];
    snprintf(path, sizeof path, "/proc/%d/maps", (int)pid);
    FILE *file = fopen(path, "re");
    CHECK(file != NULL);
    int count = 0;
    while (fgets(line, sizeof line, file) != NULL)
        count += strstr(line, "memfd:shardd") != NULL;
    fclose(file);
    return count;
}

long rss_kib(pid_t pid)
{
    char path[64], line[256];
    long kib = -1;
    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    FILE *file = fopen(path, "re");
    CHECK(file != NULL);
    while (fgets(line, sizeof line, file) != NULL)
        if (sscanf(line, "VmRSS: %ld kB", &kib) == 1)
            break;
    fclose(file);
    return kib;
}

void expect_daemon_idle(pid_t pid, int fds, int maps)
{
    const uint64_t end_ms = test_now_ms() + TEST_HANG_MS;
    while (test_now_ms() < end_ms) {
        if (count_fds(pid) <= fds && count_segment_maps(pid) <= maps)
            return;
        sleep_ms(10);
    }
    FAIL("daemon keeps %d descriptors (was %d), %d segment maps (was %d)", count_fds(pid), fds,
         count_segment_maps(pid), maps);
}

int http_connect(const struct fixture *f, int index)
{
    char device[FIXTURE_DEVICE_BYTES];
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    snprintf(address.sun_path, sizeof address.sun_path, "%.80s/%s.status", f->dir,
             fixture_device(f, index, device));
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0);
    if (connect(fd, (const struct sockaddr *)&address, sizeof address) == 0)
        return fd;
    close(fd);
    return -1;
}

void http_send(int fd, const char *text)
{
    const size_t bytes = strlen(text);
    size_t sent = 0;
    while (sent < bytes) {
        const ssize_t n = send(fd, text + sent, bytes - sent, MSG_NOSIGNAL);
        if (n <= 0)
            return; /* it has had enough of us */
        sent += (size_t)n;
    }
}

struct http_reply http_receive(int fd, uint64_t timeout_ms)
{
    struct http_reply r = { .text = malloc(1) };
    size_t used = 0, room = 0;
    const uint64_t end_ms = test_now_ms() + timeout_ms;
    for (;;) {
        struct pollfd p = { .fd = fd, .events = POLLIN };
        const uint64_t now_ms = test_now_ms();
        if (now_ms >= end_ms || poll(&p, 1, (int)(end_ms - now_ms)) <= 0)
            break;
        if (used + 65536 > room) {
            room = 2 * used + 65536;
            r.text = realloc(r.text, room + 1);
            CHECK(r.text != NULL);
        }
        const ssize_t n = read(fd, r.text + used, room - used);
        if (n <= 0)
            break;
        used += (size_t)n;
    }
    close(fd);
    r.text[used] = '\0';
    /* NOLINTBEGIN(clang-analyzer-unix.Malloc): the caller's to free */
    if (sscanf(r.text, "HTTP/1.%*d %d", &r.code) != 1)
        r.code = 0;
    const char *body = strstr(r.text, "\r\n\r\n");
    /* NOLINTEND(clang-analyzer-unix.Malloc) */
    r.body = body != NULL ? body + 4 : r.text + used;
    r.body_bytes = used - (size_t)(r.body - r.text);
    return r;
}

struct http_reply http_ask(const struct fixture *f, int index, const char *method, const char *path)
{
    char request[512];
    const uint64_t start_ms = test_now_ms();
    const int fd = http_connect(f, index);
    EXPECT(fd >= 0);
    snprintf(request, sizeof request, "%s %s HTTP/1.1\r\nHost: localhost\r\n\r\n", method, path);
    http_send(fd, request);
    struct http_reply r = http_receive(fd, TEST_HANG_MS);
    r.took_ms = test_now_ms() - start_ms;
    return r;
}

/* The snapshot was taken since then. */
static bool is_fresh(const struct http_reply *r, double since_s)
{
    static const char word[] = "\"time_s\":";
    const char *at = strstr(r->body, word);
    return at != NULL && strtod(at + strlen(word), NULL) >= since_s;
}

struct http_reply http_get(const struct fixture *f, int index, const char *path)
{
    const bool is_status = strcmp(path, "/status") == 0;
    const uint64_t end_ms = test_now_ms() + TEST_HANG_MS;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    const double since_s = (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
    struct http_reply r = http_ask(f, index, "GET", "/status");
    while (r.code == 200 && !is_fresh(&r, since_s) && test_now_ms() < end_ms) {
        free(r.text);
        r = http_ask(f, index, "GET", "/status");
    }
    if (is_status)
        return r;
    free(r.text);
    return http_ask(f, index, "GET", path);
}
