/* See relay.h. */
#include "tests/fuzz/relay.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/eventfd.h>

#include "daemon/relay/attach.h"
#include "daemon/relay/bulk_head.h"
#include "daemon/relay/thread.h"
#include "proto/share/segment_file.h"

#define TICKETS 16u

struct bulk {
    struct bulk_hooks hooks;
    struct bulk_count *count;
    struct shd_err failed; /* code not 0: what ended it */
    uint64_t bytes;
    int thread; /* of a mirror's; -1: the input's own */
    bool in_hook;
};

/* A mirror's thread; all behind the lock. */
struct far_thread {
    pthread_t id;
    void (*main)(struct relay *relay, void *arg);
    struct relay *relay;
    void *arg;
    struct bulk *bulk; /* NULL: it has not dialed */
    const struct far_frame *told;
    bool ended;
};

struct far_daemon far_daemon = { .z = { .fd = -1 }, .side = -1 };

static struct {
    const struct far_script *script;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct far_thread threads[FAR_MIRRORS_MAX];
    unsigned thread_count, interrupts;
    bool over, sends;
    struct segment tickets[TICKETS]; /* that the daemon has given out */
    int ready_fd;                    /* always readable */
} far = { .lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER };

static _Thread_local int own_thread = -1;

void far_begin(const struct far_script *script)
{
    if (far.ready_fd == 0) {
        far.ready_fd = eventfd(1, EFD_CLOEXEC);
        CHECK(far.ready_fd >= 0);
    }
    far.script = script;
    far.thread_count = far.interrupts = 0;
    far.over = far.sends = false;
    for (unsigned i = 0; i < TICKETS; i++)
        far.tickets[i] = SEGMENT_CLOSED;
}

void far_end(void)
{
    pthread_mutex_lock(&far.lock);
    far.over = true;
    pthread_cond_broadcast(&far.changed);
    pthread_mutex_unlock(&far.lock);
    for (unsigned i = 0; i < far.thread_count; i++)
        CHECK(pthread_join(far.threads[i].id, NULL) == 0);
    for (unsigned i = 0; i < TICKETS; i++)
        segment_close(&far.tickets[i]);
    zconn_close(&far_daemon.z);
    if (far_daemon.side >= 0)
        close(far_daemon.side);
    far_daemon.side = -1;
}

void far_interrupt(unsigned turns)
{
    if (!far.sends)
        far.interrupts = turns;
}

/* -- Frames ------------------------------------------------------------------------------------ */

static int fail(struct bulk *bulk, int r, const struct shd_err *why, struct shd_err *e)
{
    fuzz_check_refusal(r, why);
    bulk->failed = *why;
    return err_copy(why, e);
}

/* All of it is to be there, and nobody's but who is meant. */
static void fill(uint8_t *to, const struct far_frame *frame)
{
    const uint64_t given = frame->head.bytes < sizeof frame->payload ? frame->head.bytes
                                                                     : sizeof frame->payload;
    CHECK(to != NULL || frame->head.bytes == 0);
    if (given == 0)
        return;
    memcpy(to, frame->payload, given);
    for (uint64_t at = given; at < frame->head.bytes; at += 512)
        to[at] = 0;
    if (frame->head.bytes > given)
        to[frame->head.bytes - 1] = 0;
}

int far_deliver(struct bulk *bulk, const struct far_frame *frame, struct shd_err *e)
{
    uint8_t wire[BULK_HEAD_BYTES];
    struct bulk_head head;
    struct shd_err why = { 0 };
    void *to = NULL;
    if (bulk->failed.code != SHD_OK)
        return err_copy(&bulk->failed, e);
    bulk_head_pack(&frame->head, wire);
    int r = bulk_head_unpack(wire, &head, &why);
    if (r == SHD_OK && head.type == BULK_PING)
        return SHD_OK;
    bulk->in_hook = true;
    if (r == SHD_OK)
        r = bulk->hooks.place(bulk->hooks.ctx, &head, &to, &why);
    if (r == SHD_OK) {
        fill(to, frame);
        bulk->bytes += head.bytes;
        r = bulk->hooks.done(bulk->hooks.ctx, &head, to, &why);
    }
    bulk->in_hook = false;
    return r == SHD_OK ? r : fail(bulk, r, &why, e);
}

/* -- daemon/relay/thread.h --------------------------------------------------------------------- */

static void *thread_main(void *arg)
{
    const unsigned index = (unsigned)(uintptr_t)arg;
    struct far_thread *t = &far.threads[index];
    own_thread = (int)index;
    t->main(t->relay, t->arg);
    pthread_mutex_lock(&far.lock);
    t->ended = true;
    pthread_cond_broadcast(&far.changed);
    pthread_mutex_unlock(&far.lock);
    return NULL;
}

int relay_thread(struct relay *relay, void (*main)(struct relay *relay, void *arg), void *arg,
                 struct shd_err *e)
{
    CHECK(own_thread < 0);
    if (far.thread_count == FAR_MIRRORS_MAX)
        return err_set(e, SHD_EBUSY, "more than %u connections", FAR_MIRRORS_MAX);
    struct far_thread *t = &far.threads[far.thread_count];
    *t = (struct far_thread){ .main = main, .relay = relay, .arg = arg };
    CHECK(pthread_create(&t->id, NULL, thread_main, (void *)(uintptr_t)far.thread_count) == 0);
    far.thread_count++;
    return SHD_OK;
}

void far_tell_mirror(unsigned index, const struct far_frame *frame)
{
    if (index >= far.thread_count)
        return;
    struct far_thread *t = &far.threads[index];
    pthread_mutex_lock(&far.lock);
    while (t->bulk == NULL && !t->ended)
        pthread_cond_wait(&far.changed, &far.lock);
    t->told = t->ended ? NULL : frame;
    pthread_cond_broadcast(&far.changed);
    while (t->told != NULL && !t->ended)
        pthread_cond_wait(&far.changed, &far.lock);
    pthread_mutex_unlock(&far.lock);
}

/* One that refuses a frame is seen to have taken it when its thread has ended. */
static int mirror_receive(struct bulk *bulk, struct shd_err *e)
{
    struct far_thread *t = &far.threads[bulk->thread];
    pthread_mutex_lock(&far.lock);
    while (t->told == NULL && !far.over)
        pthread_cond_wait(&far.changed, &far.lock);
    const struct far_frame *told = t->told;
    pthread_mutex_unlock(&far.lock);
    const int r = told != NULL ? far_deliver(bulk, told, e)
                               : err_set(e, SHD_EGONE, "the input is over");
    if (r == SHD_OK) {
        pthread_mutex_lock(&far.lock);
        t->told = NULL;
        pthread_cond_broadcast(&far.changed);
        pthread_mutex_unlock(&far.lock);
    }
    return r;
}

/* -- daemon/relay/bulk.h ----------------------------------------------------------------------- */

static struct bulk *bulk_new(void)
{
    struct bulk *bulk = calloc(1, sizeof *bulk);
    CHECK(bulk != NULL);
    bulk->thread = own_thread;
    return bulk;
}

int bulk_dial(const struct bulk_keys *keys, const char *name, uint64_t timeout_ns,
              struct bulk **ret_bulk, struct shd_err *e)
{
    (void)keys;
    (void)timeout_ns;
    (void)e;
    CHECK(strcmp(name, "b") == 0);
    struct bulk *bulk = *ret_bulk = bulk_new();
    if (bulk->thread < 0)
        return SHD_OK;
    pthread_mutex_lock(&far.lock);
    far.threads[bulk->thread].bulk = bulk;
    pthread_cond_broadcast(&far.changed);
    pthread_mutex_unlock(&far.lock);
    return SHD_OK;
}

int bulk_accept(const struct bulk_keys *keys, int fd, uint64_t timeout_ns, struct bulk **ret_bulk,
                struct shd_err *e)
{
    (void)keys;
    (void)timeout_ns;
    (void)e;
    close(fd);
    *ret_bulk = bulk_new();
    return SHD_OK;
}

void bulk_end(struct bulk *bulk)
{
    (void)bulk; /* which takes no payload beside bulk_receive() */
}

void bulk_close(struct bulk *bulk)
{
    free(bulk);
}

const char *bulk_peer(const struct bulk *bulk)
{
    (void)bulk;
    return "b";
}

int bulk_fd(const struct bulk *bulk)
{
    (void)bulk;
    return far.ready_fd;
}

uint64_t bulk_bytes(const struct bulk *bulk)
{
    return bulk->bytes;
}

void bulk_set_hooks(struct bulk *bulk, const struct bulk_hooks *hooks)
{
    bulk->hooks = *hooks;
}

void bulk_set_count(struct bulk *bulk, struct bulk_count *count)
{
    bulk->count = count;
}

int bulk_receive(struct bulk *bulk, struct shd_err *e)
{
    if (bulk->failed.code != SHD_OK)
        return err_copy(&bulk->failed, e);
    if (bulk->thread >= 0)
        return mirror_receive(bulk, e);
    const int r = far.script->turn(bulk, e);
    return r == SHD_OK ? SHD_PENDING : r;
}

/* All of the payload is read, half of it behind what comes meanwhile. */
int bulk_send(struct bulk *bulk, const struct bulk_head *head, const void *payload,
              struct shd_err *e)
{
    static volatile uint8_t sum;
    const uint8_t *data = payload;
    int r = bulk->failed.code != SHD_OK ? err_copy(&bulk->failed, e) : SHD_OK;
    CHECK(!bulk->in_hook && head->type <= UINT16_MAX && head->bytes <= FAR_BYTES_MAX);
    if (bulk->thread >= 0)
        return r;
    far.sends = true;
    for (; r == SHD_OK && far.interrupts > 0; far.interrupts--)
        r = far.script->turn(bulk, e);
    far.sends = false;
    if (r != SHD_OK)
        return r;
    for (uint64_t i = 0; i < head->bytes; i++)
        sum = (uint8_t)(sum + data[i]);
    far.script->sent(head, payload);
    return SHD_OK;
}

int bulk_tick(struct bulk *bulk, struct shd_err *e)
{
    return bulk->failed.code != SHD_OK ? err_copy(&bulk->failed, e) : SHD_OK;
}

/* -- daemon/relay/attach.h --------------------------------------------------------------------- */

int attach_open(const char *dir, const char *device, struct attach *ret_attach, struct shd_err *e)
{
    static const uint8_t token[SHD_TOKEN_BYTES] = { 7 };
    int side[2], requests[2];
    (void)dir;
    (void)device;
    CHECK(far_daemon.side < 0);
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, side) == 0);
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, requests) == 0);
    far_daemon.side = side[1];
    *ret_attach = (struct attach){ .side_fd = side[0], .welcome = side_welcome(token, WIRE_LEVEL) };
    CHECK(zconn_open(&far_daemon.z, requests[1], /* dealer= */ false, e) == SHD_OK);
    return zconn_open(&ret_attach->z, requests[0], /* dealer= */ true, e);
}

void attach_close(struct attach *a)
{
    if (a->side_fd >= 0)
        close(a->side_fd);
    zconn_close(&a->z);
    *a = ATTACH_CLOSED;
}

/* The same ticket is the same segment. */
int attach_claim(struct attach *a, const struct wire_segment *segment, int *ret_fd,
                 struct shd_err *e)
{
    struct segment *at = &far.tickets[segment->ticket % TICKETS];
    (void)a;
    if (segment->bytes > FAR_BYTES_MAX)
        return err_set(e, SHD_ESEGMENT, "a segment of %llu bytes",
                       (unsigned long long)segment->bytes);
    if (at->fd < 0)
        CHECK(segment_new("fuzz", segment->kind, segment->bytes, at, e) == SHD_OK);
    const int r = segment_shared_check(at->fd, segment->kind, segment->bytes, e);
    if (r == SHD_OK)
        *ret_fd = fcntl(at->fd, F_DUPFD_CLOEXEC, 0);
    return r;
}

int attach_ask(struct attach *a, const struct wire_request *request, uint64_t timeout_ns,
               struct wire_arena *arena, struct wire_reply *ret_reply, struct shd_err *e)
{
    (void)a;
    (void)request;
    (void)timeout_ns;
    (void)arena;
    (void)ret_reply;
    return err_set(e, SHD_ENOENT, "no model");
}
