/* Real daemons for a test: forked children of the test program that run the daemon's own code on
 * a private runtime directory, with cpu0, cpu1, … or fixture.devices. They die with the test
 * program.
 *
 * fixture_start_kept(): children of a keeper (tests/lib/keeper.h) instead, which holds what they
 * store with it; fixture_restart() kills one and starts its successor.
 *
 * $SHD_TEST_PAIRS=1: each daemon that the test asks for has a replica on another host: twice as
 * many are started, of which the first half, on host a, is what the test knows, and the second,
 * on host b, has no faults planted. */
#ifndef SHD_TESTS_FIXTURE_H
#define SHD_TESTS_FIXTURE_H

#include "daemon/model/quota.h"
#include "tests/lib/keeper.h"
#include "tests/lib/test.h"

#define FIXTURE_DAEMONS_MAX 16

enum fixture_replicas {
    FIXTURE_AS_TOLD, /* by $SHD_TEST_PAIRS */
    FIXTURE_ALONE,
    FIXTURE_PAIRS,
};

struct fixture {
    char dir[256];
    char address[512]; /* all of them, as shd_connect() takes it */
    pid_t pids[FIXTURE_DAEMONS_MAX];
    int count;                                /* with replicas */
    pid_t keeper;                             /* 0: none, the daemons are our own children */
    int control;                              /* socket to it */
    const char *devices[FIXTURE_DAEMONS_MAX]; /* set before the start; NULL: cpu and its index */
    bool pin;                                 /* likewise */
    enum fixture_replicas replicas;           /* likewise */
    bool paired;
    const char *state, *publish, *snapshots; /* set before the start, as shardd takes them; NULL:
                                              * what $SHD_TEST_STATE and so on say, or memory */
    struct quota_config quota;               /* likewise */
};

/* For tests of pairs in a program that runs in both ways: once is enough. */
#define NEEDS_PAIRS()                                 \
    do {                                              \
        if (!fixture_in_pairs())                      \
            SKIP("it is of pairs: SHD_TEST_PAIRS=1"); \
    } while (0)
/* For those to whom replicas make no difference, and that take long. */
#define NEEDS_NO_PAIRS()                       \
    do {                                       \
        if (fixture_in_pairs())                \
            SKIP("it is the same with pairs"); \
    } while (0)
bool fixture_in_pairs(void);

#define FIXTURE_DEVICE_BYTES 16

const char *fixture_device(const struct fixture *f, int index, char name[FIXTURE_DEVICE_BYTES]);

__attribute__((noreturn)) void fixture_serve(const struct fixture *f, int index);

void fixture_wait_up(const struct fixture *f, int index);

extern pid_t fixture_owner;

const char *fixture_base(void);

/* in_child runs first thing in each daemon's process (or is NULL). Fork before any thread. */
void fixture_start(struct fixture *f, int count, void (*in_child)(int index));

long fixture_ask(const struct fixture *f, enum keeper_order order, int index, const char *text);

/* Start a successor where none runs. fail: its SHARDD_FAIL, or "". Does not wait for it. */
void fixture_succeed(struct fixture *f, int index, const char *fail);

/* kill -9, and a successor with all that was stored. */
void fixture_restart(struct fixture *f, int index);

/* As fixture_start(), with a keeper. fail: the daemons' SHARDD_FAIL, or "". */
void fixture_start_kept(struct fixture *f, int count, const char *fail);

/* Stop the keeper, with no room at its sockets for a word more. SIGCONT lets it go on. */
void fixture_stop_keeper(const struct fixture *f);

/* End the daemons in good order: each must exit with 0 and leave nothing but its lock file, and
 * where a keeper has its models its socket. */
void fixture_stop(struct fixture *f);

int count_fds(pid_t pid);

/* Of memory alone: that a daemon is up is seen by a connection, which it may have for a moment. */
int count_memfds(pid_t pid);

/* Bytes of the memory that these processes have descriptors of, each piece once. */
uint64_t memfd_bytes(const pid_t *pids, int count);

int count_segment_maps(pid_t pid);

long rss_kib(pid_t pid);

/* What a daemon holds for others goes once they have gone; it learns of it asynchronously. */
void expect_daemon_idle(pid_t pid, int fds, int maps);

/* A small HTTP client: one request over the status socket, everything in memory. */
struct http_reply {
    int code;   /* 0: the connection was closed without an answer */
    char *text; /* owned: head and body, NUL-terminated */
    const char *body;
    size_t body_bytes;
    uint64_t took_ms;
};

int http_connect(const struct fixture *f, int index);

void http_send(int fd, const char *text);

/* Read to the end; closes fd. */
struct http_reply http_receive(int fd, uint64_t timeout_ms);

struct http_reply http_ask(const struct fixture *f, int index, const char *method,
                           const char *path);

/* What is so by now: a daemon whose loop is held up for 200 ms answers with what was before, and is
 * asked again. */
struct http_reply http_get(const struct fixture *f, int index, const char *path);

#endif
