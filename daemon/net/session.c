/* See session.h. */
#include "daemon/net/session.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include <openssl/crypto.h>

#include "daemon/base/log.h"
#include "daemon/base/state.h"
#include "daemon/core/replies.h"
#include "daemon/net/door.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/process.h"
#include "proto/base/sys.h"
#include "proto/share/fdpass.h"

#define INDEX_BITS          12
#define BITS                64u /* of a word of session_models */
#define HELLO_NS            (5 * NS_PER_S)
#define WAITING_MAX         512u /* sessions of one user that wait for their Hello */
#define CLOSING_MAX         32u  /* places of some that have just been ended */
#define SESSION_DESCRIPTORS 4u   /* side channel, process, connection, inbox */
#define REST_MAX            256u /* descriptors for all else */
#define GIVEN_PART          4u   /* of the descriptors that are kept for all else */
#define SIDE_LOOKS_MAX      64u  /* messages of a side channel at once */
_Static_assert((1u << INDEX_BITS) == SESSIONS_MAX, "a session id carries its table index");

int session_table_init(struct session_table *table, struct shd_err *e)
{
    uint32_t epoch;
    if (getrandom(&epoch, sizeof epoch, 0) != (ssize_t)sizeof epoch)
        return err_sys(e, SHD_EIO, "get random bytes");
    struct session *items = sys_pages(SESSIONS_MAX * sizeof *items);
    if (items == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %u sessions", SESSIONS_MAX);
    *table = (struct session_table){ .items = items, .epoch = epoch, .epoch_first = epoch };
    return SHD_OK;
}

void session_table_deinit(struct session_table *table)
{
    for (uint32_t i = 0; i < table->made; i++)
        replies_free(table->items[i].replies); /* of those whose requests were never answered */
    sys_pages_free(table->items, SESSIONS_MAX * sizeof *table->items);
    *table = (struct session_table){ 0 };
}

void session_reuse(struct session *s)
{
    CHECK(s->state == SESSION_DEAD);
    if (s->ops > 0 || s->closing > 0)
        return;
    s->daemon->sessions->used--;
    replies_free(s->replies);
    memset(s, 0, sizeof *s);
    s->side_fd = s->life_fd = s->passed.fd = -1;
}

static void poll_closed(uv_handle_t *handle)
{
    struct session *s = handle->data;
    s->closing--;
    session_reuse(s);
}

static void close_poll(struct session *s, uv_poll_t *poll, int *fd)
{
    if (*fd < 0)
        return;
    s->closing++;
    uv_poll_stop(poll);
    uv_close((uv_handle_t *)poll, poll_closed);
    close(*fd);
    *fd = -1;
}

static void drop_passed(struct session *s)
{
    if (s->passed.fd < 0)
        return;
    close(s->passed.fd);
    s->passed = (struct session_passed){ .fd = -1 };
    s->daemon->sessions->passed--;
}

static void drop_ticket(struct session *s, struct session_ticket *t)
{
    if (t->given > 0) {
        close(t->fd);
        s->daemon->sessions->given--;
    }
    *t = (struct session_ticket){ 0 };
}

void session_end(struct session *s, const char *why)
{
    CHECK(s->state == SESSION_NEW || s->state == SESSION_OPEN);
    log_info("op=session_end session=%016" PRIx64 " pid=%d name=%s why=\"%s\"", s->id, (int)s->pid,
             s->name, why);
    const bool was_open = s->state == SESSION_OPEN;
    s->state = SESSION_DEAD;
    close_poll(s, &s->poll, &s->side_fd);
    close_poll(s, &s->life, &s->life_fd);
    for (uint32_t i = 0; i < SESSION_TICKETS_MAX; i++)
        drop_ticket(s, &s->tickets.items[i]);
    drop_passed(s);
    OPENSSL_cleanse(s->token, sizeof s->token);
    s->ops++; /* waiting requests that are finished now must not free the place under us */
    s->daemon->hooks->session_ended(s, was_open);
    s->ops--;
    session_reuse(s);
}

static void answer_claim(struct session *s, uint64_t ticket)
{
    struct side_msg msg = { .magic = SIDE_MAGIC, .protocol = SHD_PROTOCOL, .ticket = ticket };
    struct session_ticket *t = NULL;
    for (uint32_t i = 0; i < SESSION_TICKETS_MAX && ticket != 0; i++)
        if (s->tickets.items[i].ticket == ticket)
            t = &s->tickets.items[i];
    if (t != NULL) {
        msg.type = SIDE_SEGMENT;
        msg.kind = (uint32_t)t->kind;
        msg.bytes = t->bytes;
    } else {
        msg.type = SIDE_ERROR;
        msg.status = SHD_ENOENT;
        strcpy(msg.text, "no such ticket in this session");
    }
    struct shd_err e;
    const int r = side_send(s->side_fd, &msg, t != NULL ? t->fd : -1, &e);
    if (t != NULL)
        drop_ticket(s, t);
    if (r != SHD_OK)
        session_end(s, e.text);
}

static void lose_passed(struct session *s)
{
    const uint64_t ticket = s->passed.ticket;
    drop_passed(s);
    s->passed = (struct session_passed){ .fd = -1, .ticket = ticket, .lost = true };
}

/* Its bytes are looked at when a request names it. Who passes and never asks loses its place; so
 * may who asks, where many pass at the same time, and it is to pass it again. */
static void keep_passed(struct session *s, int fd, uint64_t ticket)
{
    struct session_table *table = s->daemon->sessions;
    struct session *oldest = NULL;
    drop_passed(s);
    for (uint32_t i = 0; table->passed == SESSIONS_PASSED_MAX && i < table->made; i++) {
        struct session *other = &table->items[i];
        if (other->passed.fd >= 0 &&
            (oldest == NULL || other->passed.number < oldest->passed.number))
            oldest = other;
    }
    if (oldest != NULL)
        lose_passed(oldest);
    s->passed = (struct session_passed){ .fd = fd,
                                         .ticket = ticket,
                                         .number = ++table->passed_last };
    table->passed++;
}

/* Take one message, if one is there. False: none, or the session has ended. */
static bool take_side_message(struct session *s)
{
    struct side_msg msg;
    int fd;
    struct shd_err e;
    const int r = side_recv(s->side_fd, /* timeout_ms= */ 0, &msg, &fd, &e);
    if (r == SHD_ETIMEDOUT)
        return false;
    if (r != SHD_OK) {
        session_end(s, r == SHD_EGONE ? "it hung up" : e.text);
        return false;
    }
    const bool open = s->state == SESSION_OPEN;
    if (open && msg.type == SIDE_SEGMENT && msg.kind == SEGMENT_SPEC) {
        keep_passed(s, fd, msg.ticket);
        return true;
    }
    if (fd >= 0)
        close(fd);
    if (open && msg.type == SIDE_CLAIM)
        answer_claim(s, msg.ticket);
    else if (open && msg.type == SIDE_WAKE)
        s->daemon->hooks->woken(s);
    else
        session_end(s, "unexpected message on the side channel");
    return s->state == SESSION_OPEN;
}

static void side_event(uv_poll_t *poll, int status, int events)
{
    (void)events;
    struct session *s = poll->data;
    if (status < 0)
        session_end(s, uv_strerror(status));
    else
        take_side_message(s);
}

int session_take_passed(struct session *s, uint64_t ticket)
{
    /* It may lie in the socket still, which another one than the request's is. */
    for (uint32_t i = 0; i < SIDE_LOOKS_MAX && s->state == SESSION_OPEN; i++)
        if ((s->passed.fd >= 0 && s->passed.ticket == ticket) || !take_side_message(s))
            break;
    if (s->passed.fd < 0 || s->passed.ticket != ticket)
        return -1;
    const int fd = s->passed.fd;
    s->passed = (struct session_passed){ .fd = -1 };
    s->daemon->sessions->passed--;
    return fd;
}

bool session_is_there(struct session *s)
{
    for (uint32_t i = 0; i < SIDE_LOOKS_MAX && s->state == SESSION_OPEN; i++)
        if (!take_side_message(s))
            break;
    return s->state == SESSION_OPEN;
}

bool session_lost_passed(struct session *s, uint64_t ticket)
{
    const bool lost = s->passed.lost && s->passed.ticket == ticket;
    if (lost)
        s->passed = (struct session_passed){ .fd = -1 };
    return lost;
}

static void life_event(uv_poll_t *poll, int status, int events)
{
    (void)status;
    (void)events;
    session_end(poll->data, "its process has ended");
}

/* Best effort: without it the side channel tells. */
static void watch_process(struct session *s)
{
    const int fd = side_pidfd(s->side_fd, s->pid);
    if (fd < 0 || uv_poll_init(s->daemon->loop, &s->life, fd) < 0) {
        if (fd >= 0)
            close(fd);
        return;
    }
    s->life_fd = fd;
    s->life.data = s;
    uv_poll_start(&s->life, UV_READABLE, life_event);
}

/* -- Room ---------------------------------------------------------------------------------------
 */

/* How many sessions there may be: each has four descriptors of those that are left when models,
 * files and those that look have theirs. */
static uint32_t sessions_max(void)
{
    const uint32_t all = door_descriptors_max();
    const uint32_t rest = all / 2 < REST_MAX ? all / 2 : REST_MAX;
    const uint32_t max = (all - rest) / SESSION_DESCRIPTORS;
    return max < SESSIONS_MAX ? max : SESSIONS_MAX;
}

/* Without those that have just ended: their descriptors are free already. */
static uint32_t count_live(const struct session_table *table)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < table->made; i++)
        count += table->items[i].state == SESSION_NEW || table->items[i].state == SESSION_OPEN;
    return count;
}

int session_too_many(struct daemon *d, struct shd_err *e)
{
    const uint32_t max = sessions_max();
    return err_set(e, SHD_EBUSY, "device %s: too many sessions (%" PRIu32 " of %" PRIu32 ")%s",
                   d->device, count_live(d->sessions), max,
                   max < SESSIONS_MAX ? "; raise LimitNOFILE= or ulimit -n"
                                      : ", the most there are");
}

static struct session *oldest_waiting(struct session_table *table, const uid_t *uid,
                                      uint32_t *ret_count)
{
    struct session *oldest = NULL;
    *ret_count = 0;
    for (uint32_t i = 0; i < table->made; i++) {
        struct session *s = &table->items[i];
        if (s->state != SESSION_NEW || (uid != NULL && s->uid != *uid))
            continue;
        ++*ret_count;
        if (oldest == NULL || s->id >> INDEX_BITS < oldest->id >> INDEX_BITS)
            oldest = s;
    }
    return oldest;
}

bool session_push_out(struct daemon *d)
{
    uint32_t count;
    struct session *oldest = oldest_waiting(d->sessions, NULL, &count);
    if (oldest != NULL)
        session_end(oldest, "others wait, and it has said no Hello");
    return oldest != NULL;
}

bool session_make_room(struct daemon *d, uid_t uid)
{
    uint32_t count;
    const uint32_t live = count_live(d->sessions);
    if (live >= sessions_max())
        return session_push_out(d) && d->sessions->used < SESSIONS_MAX;
    if (d->sessions->used + CLOSING_MAX >= SESSIONS_MAX) { /* a place is free in the next turn */
        session_push_out(d);
    } else if (live >= WAITING_MAX) {
        struct session *oldest = oldest_waiting(d->sessions, &uid, &count);
        if (count >= WAITING_MAX)
            session_end(oldest, "its user has too many that have said no Hello");
    }
    return d->sessions->used < SESSIONS_MAX;
}

bool session_sweep(struct daemon *d)
{
    const uint64_t now_ns = uv_hrtime();
    bool left = false;
    for (uint32_t i = 0; i < d->sessions->made; i++) {
        struct session *s = &d->sessions->items[i];
        if (s->state == SESSION_NEW && now_ns - s->since_ns >= HELLO_NS)
            session_end(s, "it has said no Hello for 5 s");
        left = left || s->state == SESSION_NEW;
    }
    return left;
}

/* -- Beginning ----------------------------------------------------------------------------------
 */

static struct session *find_free(struct session_table *table)
{
    for (uint32_t i = 0; i < table->made; i++)
        if (table->items[i].state == SESSION_FREE)
            return &table->items[i];
    if (table->made == SESSIONS_MAX)
        return NULL;
    struct session *s = &table->items[table->made++];
    s->side_fd = s->life_fd = s->passed.fd = -1;
    return s;
}

static int send_welcome(struct session *s, int fd, struct shd_err *e)
{
    if (getrandom(s->token, sizeof s->token, 0) != (ssize_t)sizeof s->token)
        return err_sys(e, SHD_EIO, "get random bytes");
    const struct side_msg msg = side_welcome(s->token, WIRE_LEVEL);
    return side_send(fd, &msg, /* pass_fd= */ -1, e);
}

int session_new(struct daemon *d, int fd, const struct side_peer *peer, struct shd_err *e)
{
    struct session_table *table = d->sessions;
    struct session *s = find_free(table);
    struct process process;
    if (s == NULL)
        return session_too_many(d, e);
    const uint32_t index = (uint32_t)(s - table->items);
    int r = send_welcome(s, fd, e);
    if (r != SHD_OK)
        return r;
    r = uv_poll_init(d->loop, &s->poll, fd);
    if (r < 0)
        return err_set(e, SHD_EIO, "poll a side channel: %s", uv_strerror(r));
    s->poll.data = s;
    uv_poll_start(&s->poll, UV_READABLE | UV_DISCONNECT, side_event);
    s->state = SESSION_NEW;
    s->daemon = d;
    s->id = ++table->epoch << INDEX_BITS | index;
    s->side_fd = fd;
    s->pid = peer->pid;
    s->uid = peer->uid;
    s->since_ns = uv_hrtime();
    if (process_read(peer->pid, &process))
        s->start_time = process.start_time;
    watch_process(s);
    table->used++;
    return SHD_OK;
}

int session_user(const struct session *s, uint32_t *ret_uid, uint32_t *ret_gid, struct shd_err *e)
{
    struct side_peer peer;
    if (s->side_fd < 0)
        return err_set(e, SHD_EGONE, "session ended");
    const int r = side_peer(s->side_fd, &peer, e);
    if (r != SHD_OK)
        return r;
    *ret_uid = peer.uid;
    *ret_gid = peer.gid;
    return SHD_OK;
}

int session_take_view(struct daemon *d, uint64_t view, struct shd_err *e)
{
    struct session_table *table = d->sessions;
    if (view == 0)
        return SHD_OK;
    if (view < table->view)
        return err_set(e, SHD_EBUSY,
                       "view %" PRIu64
                       " of the hosts is not the newest: a session with view %" PRIu64
                       " is here; the arbiter has it",
                       view - 1, table->view - 1);
    for (uint32_t i = 0; view > table->view && i < table->made; i++) {
        struct session *s = &table->items[i];
        if (s->state == SESSION_OPEN && s->said.view > 0 && s->said.view < view)
            session_end(s, "its view of the hosts is not the newest any more");
    }
    table->view = view;
    return SHD_OK;
}

bool session_has_ended(const struct session_table *table, uint64_t id)
{
    const struct session *s = &table->items[id % SESSIONS_MAX];
    const uint64_t number = id >> INDEX_BITS;
    return number > table->epoch_first && number <= table->epoch &&
           (s->id != id || s->state == SESSION_DEAD);
}

struct session *session_by_conn(struct daemon *d, uint64_t conn)
{
    for (uint32_t i = 0; i < d->sessions->made; i++) {
        struct session *s = &d->sessions->items[i];
        if (s->state == SESSION_OPEN && s->conn == conn)
            return s;
    }
    return NULL;
}

struct session *session_by_token(struct daemon *d, const uint8_t *token)
{
    struct session *found = NULL;
    for (uint32_t i = 0; i < d->sessions->made; i++) {
        struct session *s = &d->sessions->items[i];
        if (s->state == SESSION_NEW && CRYPTO_memcmp(s->token, token, WIRE_TOKEN_BYTES) == 0)
            found = s;
    }
    return found;
}

static uint64_t add_ticket(struct session *s, struct session_ticket ticket)
{
    for (uint32_t i = 0; i < SESSION_TICKETS_MAX; i++) {
        struct session_ticket *t = &s->tickets.items[i];
        if (t->ticket != 0)
            continue;
        *t = ticket;
        return t->ticket = ++s->tickets.last;
    }
    return 0;
}

uint64_t session_ticket_new(struct session *s, int fd, enum segment_kind kind, uint64_t bytes)
{
    return add_ticket(s, (struct session_ticket){ .fd = fd, .kind = kind, .bytes = bytes });
}

static void drop_oldest_given(struct session_table *table)
{
    struct session *oldest = NULL;
    uint32_t at = 0;
    for (uint32_t i = 0; i < SESSIONS_MAX; i++) {
        struct session *s = &table->items[i];
        for (uint32_t k = 0; k < SESSION_TICKETS_MAX; k++)
            if (s->tickets.items[k].given > 0 &&
                (oldest == NULL || s->tickets.items[k].given < oldest->tickets.items[at].given)) {
                oldest = s;
                at = k;
            }
    }
    CHECK(oldest != NULL);
    drop_ticket(oldest, &oldest->tickets.items[at]);
}

uint64_t session_ticket_give(struct session *s, int fd, enum segment_kind kind, uint64_t bytes)
{
    struct session_table *table = s->daemon->sessions;
    if (table->given > 0 && table->given >= door_descriptors_kept() / GIVEN_PART)
        drop_oldest_given(table);
    const uint64_t ticket = add_ticket(
        s, (struct session_ticket){
               .fd = fd, .given = table->given_last + 1, .kind = kind, .bytes = bytes });
    if (ticket != 0) {
        table->given_last++;
        table->given++;
    }
    return ticket;
}

void session_ticket_forget(struct daemon *d, uint64_t id, int fd)
{
    struct session *s = &d->sessions->items[id % SESSIONS_MAX];
    for (uint32_t i = 0; s->id == id && i < SESSION_TICKETS_MAX; i++)
        if (s->tickets.items[i].ticket != 0 && s->tickets.items[i].fd == fd)
            s->tickets.items[i] = (struct session_ticket){ 0 };
}

void session_opened(struct session *s, uint32_t place)
{
    s->opened.bits[place / BITS] |= UINT64_C(1) << place % BITS;
}

bool session_has_opened(const struct session *s, uint32_t place)
{
    return (s->opened.bits[place / BITS] >> place % BITS & 1) != 0;
}

void session_closed(struct session *s, uint32_t place)
{
    s->opened.bits[place / BITS] &= ~(UINT64_C(1) << place % BITS);
}

void session_dismiss(struct session *s, const struct shd_err *why)
{
    struct side_msg msg = {
        .magic = SIDE_MAGIC, .protocol = SHD_PROTOCOL, .type = SIDE_ERROR, .status = why->code
    };
    struct shd_err ignored; /* who does not read will see */
    snprintf(msg.text, sizeof msg.text, "%.*s", (int)sizeof msg.text - 1, why->text);
    side_send(s->side_fd, &msg, /* pass_fd= */ -1, &ignored);
    session_end(s, why->text);
}

const char *session_role_name(enum wire_role role)
{
    switch (role) {
    case WIRE_TRAINER:
        return "trainer";
    case WIRE_READER:
        return "reader";
    case WIRE_ADMIN:
        return "admin";
    }
    return "?";
}
