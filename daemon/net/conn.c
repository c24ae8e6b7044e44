/* See conn.h. */
#include "daemon/net/conn.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "daemon/net/zmtp.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"
#include "proto/wire/wire.h"

#define CONNS_MAX         5120u  /* as many as sessions, and these: */
#define CONNS_WAITING_MAX 1024u  /* for their Hello, of all */
#define INPUT_BYTES       16384u /* at one look at a connection: some 300 requests */
#define HELLO_BYTES_MAX   4096u  /* of a message before there is a session */
#define HELLO_NS          (5 * NS_PER_S)
#define SWEEP_MS          500u
#define WAITING_MAX       512u /* for their Hello, of one user */
#define CLOSING_MAX       64u  /* places of some that have just been hung up on */
#define GATHER_BYTES      4096u
#define PAUSE_BYTES       65536u      /* unread: its requests wait */
#define UNREAD_BYTES_MAX  (4u << 20)  /* unread: it is hung up on */
#define KEPT_BYTES_MAX    (64u << 20) /* of all; then who has most is hung up on */
#define BUFFER_BYTES_MIN  512u        /* buffers of at most so much are kept for the next time */
#define BUFFER_KEEP_BYTES 4096u

enum conn_state { CONN_FREE, CONN_GREETING, CONN_READY, CONN_OPEN, CONN_CLOSED };

struct buffer {
    uint8_t *data; /* owned */
    size_t first, used, capacity;
};

struct conn {
    enum conn_state state;
    struct conns *all; /* borrowed */
    uint64_t id;       /* % CONNS_MAX: its place */
    int fd;            /* owned */
    uv_poll_t poll;
    int events; /* that it is polled for */
    uid_t uid;
    bool admitted;     /* has a session */
    bool skipping;     /* in a message of several frames */
    bool reading;      /* replies gather, and are written together */
    uint64_t since_ns; /* without a session since */
    struct buffer in;  /* the beginning of what is not complete */
    struct buffer out; /* what the peer has not read */
};

struct conns {
    const struct conn_events *events;
    void *ctx; /* the events' */
    uv_loop_t *loop;
    uv_timer_t timer;     /* running while a connection waits for its Hello */
    uv_prepare_t prepare; /* running while kept_bytes are too many */
    bool handles_ready;
    struct conn *items; /* owned, [CONNS_MAX] */
    uint8_t *input;     /* owned: what is being read */
    uint64_t epoch;     /* connections ever */
    uint32_t used;      /* places, also of those being closed */
    uint32_t waiting;   /* without a session */
    size_t kept_bytes;  /* of messages begun, and of replies not read */
};

/* -- Buffers ------------------------------------------------------------------------------------
 */

static void relieve(uv_prepare_t *prepare);

/* Room for bytes in all, from the first. */
static bool buffer_reserve(struct conns *all, struct buffer *b, size_t bytes)
{
    if (b->first + bytes <= b->capacity)
        return true;
    if (b->first > 0)
        memmove(b->data, b->data + b->first, b->used);
    b->first = 0;
    if (bytes <= b->capacity)
        return true;
    size_t capacity = b->capacity > 0 ? b->capacity : BUFFER_BYTES_MIN;
    while (capacity < bytes)
        capacity *= 2;
    uint8_t *data = sys_realloc(b->data, capacity);
    if (data == NULL)
        return false;
    all->kept_bytes += capacity - b->capacity;
    if (all->kept_bytes > KEPT_BYTES_MAX)
        uv_prepare_start(&all->prepare, relieve);
    b->data = data;
    b->capacity = capacity;
    return true;
}

static void buffer_release(struct conns *all, struct buffer *b)
{
    all->kept_bytes -= b->capacity;
    free(b->data);
    *b = (struct buffer){ 0 };
}

static void buffer_take(struct conns *all, struct buffer *b, size_t bytes)
{
    b->first += bytes;
    b->used -= bytes;
    if (b->used > 0)
        return;
    b->first = 0;
    if (b->capacity > BUFFER_KEEP_BYTES)
        buffer_release(all, b);
}

static bool buffer_put(struct conns *all, struct buffer *b, const void *data, size_t bytes)
{
    if (!buffer_reserve(all, b, b->used + bytes))
        return false;
    memcpy(b->data + b->first + b->used, data, bytes);
    b->used += bytes;
    return true;
}

/* -- Ending -------------------------------------------------------------------------------------
 */

static bool is_open(const struct conn *c)
{
    return c->state != CONN_FREE && c->state != CONN_CLOSED;
}

static struct conn *conn_of(struct conns *all, uint64_t id)
{
    struct conn *c = &all->items[id % CONNS_MAX];
    return c->id == id && is_open(c) ? c : NULL;
}

static void poll_closed(uv_handle_t *handle)
{
    struct conn *c = handle->data;
    struct conns *all = c->all;
    buffer_release(all, &c->in); /* a request whose reply could not be sent was read from it */
    buffer_release(all, &c->out);
    all->used--;
    *c = (struct conn){ .fd = -1 };
}

static void conn_close(struct conn *c)
{
    struct conns *all = c->all;
    CHECK(is_open(c));
    c->state = CONN_CLOSED;
    if (!c->admitted)
        all->waiting--;
    uv_poll_stop(&c->poll);
    uv_close((uv_handle_t *)&c->poll, poll_closed);
    close(c->fd);
    c->fd = -1;
}

static void conn_end(struct conn *c, const char *why)
{
    const uint64_t id = c->id;
    struct conns *all = c->all;
    conn_close(c);
    all->events->ended(all->ctx, id, why);
}

/* -- Writing ------------------------------------------------------------------------------------
 */

static void conn_event(uv_poll_t *poll, int status, int events);

static void watch(struct conn *c)
{
    int events = UV_DISCONNECT;
    if (c->out.used < PAUSE_BYTES)
        events |= UV_READABLE;
    if (c->out.used > 0)
        events |= UV_WRITABLE;
    if (events != c->events)
        uv_poll_start(&c->poll, c->events = events, conn_event);
}

/* As much as the socket takes. False: it is broken. */
static bool conn_write(const struct conn *c, const struct iovec *parts, size_t count,
                       size_t *ret_written)
{
    struct msghdr h = { .msg_iov = (struct iovec *)(uintptr_t)parts, .msg_iovlen = count };
    ssize_t n;
    do
        n = sendmsg(c->fd, &h, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    *ret_written = n > 0 ? (size_t)n : 0;
    return n >= 0 || errno == EAGAIN || errno == ENOBUFS;
}

static bool conn_put(struct conn *c, const uint8_t *header, size_t header_bytes, const void *data,
                     size_t bytes)
{
    const struct iovec parts[2] = { { (void *)(uintptr_t)header, header_bytes },
                                    { (void *)(uintptr_t)data, bytes } };
    size_t written = 0;
    const bool gather = c->reading && c->out.used + bytes < GATHER_BYTES;
    if (c->out.used == 0 && !gather && !conn_write(c, parts, ARRAY_SIZE(parts), &written))
        return false;
    if (written == header_bytes + bytes)
        return true;
    if (c->out.used + header_bytes + bytes > UNREAD_BYTES_MAX)
        return false;
    for (size_t i = 0; i < ARRAY_SIZE(parts); i++) {
        const size_t skip = written < parts[i].iov_len ? written : parts[i].iov_len;
        written -= skip;
        if (skip < parts[i].iov_len &&
            !buffer_put(c->all, &c->out, (const uint8_t *)parts[i].iov_base + skip,
                        parts[i].iov_len - skip))
            return false;
    }
    if (!gather)
        watch(c);
    return true;
}

bool conn_send(struct conns *all, uint64_t id, const void *data, size_t bytes)
{
    struct conn *c = conn_of(all, id);
    uint8_t header[ZMTP_HEADER_BYTES_MAX];
    if (c == NULL)
        return false;
    if (conn_put(c, header, zmtp_header_write(header, bytes), data, bytes))
        return true;
    conn_close(c);
    return false;
}

static void conn_flush(struct conn *c)
{
    size_t written;
    if (c->out.used == 0)
        return;
    const struct iovec part = { c->out.data + c->out.first, c->out.used };
    if (!conn_write(c, &part, 1, &written)) {
        conn_end(c, "it hung up");
        return;
    }
    buffer_take(c->all, &c->out, written);
    watch(c);
}

/* -- Reading ------------------------------------------------------------------------------------
 */

/* How many bytes what begins here has, as far as can be said. *ret_frame: as its header says, where
 * it is no greeting. */
static int item_bytes(const struct conn *c, const uint8_t *data, size_t bytes, size_t *ret_bytes,
                      struct zmtp_frame *ret_frame, struct shd_err *e)
{
    struct zmtp_frame frame;
    if (c->state == CONN_GREETING) {
        *ret_bytes = ZMTP_GREETING_BYTES;
        return SHD_OK;
    }
    const int r = zmtp_header(data, bytes, &frame, e);
    if (r == SHD_PENDING) {
        *ret_bytes = ZMTP_HEADER_BYTES_MAX;
        return SHD_PENDING;
    }
    if (r != SHD_OK)
        return r;
    const size_t limit = c->admitted ? WIRE_FRAME_BYTES_MAX : HELLO_BYTES_MAX;
    if (frame.bytes > limit)
        return err_set(e, SHD_ERANGE, "it sends a message of %" PRIu64 " bytes, %zu are allowed%s",
                       frame.bytes, limit, c->admitted ? "" : " before Hello");
    *ret_bytes = frame.header_bytes + (size_t)frame.bytes;
    *ret_frame = frame;
    return SHD_OK;
}

static void take_message(struct conn *c, const struct zmtp_frame *frame, const uint8_t *body)
{
    struct conns *all = c->all;
    if (!frame->more && !c->skipping) {
        all->events->message(all->ctx, c->id, body, (size_t)frame->bytes);
        return;
    }
    if (!c->skipping)
        all->events->several(all->ctx, c->id);
    c->skipping = frame->more;
}

/* A whole greeting or frame. */
static int take_item(struct conn *c, const uint8_t *data, const struct zmtp_frame *frame,
                     struct shd_err *e)
{
    int r;
    if (c->state == CONN_GREETING) {
        r = zmtp_greeting_check(data, e);
        c->state = CONN_READY;
        return r;
    }
    const uint8_t *body = data + frame->header_bytes;
    if (c->state == CONN_READY) {
        r = frame->command ? zmtp_ready_check(body, (size_t)frame->bytes, e)
                           : err_set(e, SHD_EPROTO, "it sends a message before READY");
        c->state = CONN_OPEN;
        return r;
    }
    if (!frame->command) /* others, as heartbeats, change nothing here */
        take_message(c, frame, body);
    return SHD_OK;
}

/* Take the whole items of data. What is left of it is the beginning of one, of *ret_need bytes. */
static int take_items(struct conn *c, const uint8_t *data, size_t bytes, size_t *ret_taken,
                      size_t *ret_need, struct shd_err *e)
{
    size_t taken = 0;
    while (taken < bytes) {
        struct zmtp_frame frame = { 0 };
        int r = item_bytes(c, data + taken, bytes - taken, ret_need, &frame, e);
        if (r < 0)
            return r;
        if (r == SHD_PENDING || *ret_need > bytes - taken)
            break;
        r = take_item(c, data + taken, &frame, e);
        taken += *ret_need;
        if (r != SHD_OK || c->state == CONN_CLOSED)
            return r;
    }
    *ret_taken = taken;
    return SHD_OK;
}

/* recv(), as long as nothing interrupts it. 0: the peer hung up; -1 with errno. */
static ssize_t receive(const struct conn *c, uint8_t *data, size_t bytes)
{
    ssize_t n;
    do
        n = recv(c->fd, data, bytes, MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    return n;
}

/* What is begun is read to its end, and no further. */
static int read_rest(struct conn *c, ssize_t *ret_n, struct shd_err *e)
{
    struct buffer *in = &c->in;
    struct zmtp_frame ignored;
    size_t need = 0, taken = 0;
    int r = item_bytes(c, in->data, in->used, &need, &ignored, e);
    if (r < 0) /* it was no larger than a session may send, and the session has ended */
        return r;
    if (r == SHD_PENDING) /* the header, byte by byte: it may be all of the frame */
        need = in->used + 1;
    if (!buffer_reserve(c->all, in, need))
        return err_set(e, SHD_ENOMEM, "no memory for a message of %zu bytes", need);
    *ret_n = receive(c, in->data + in->used, need - in->used);
    if (*ret_n <= 0)
        return SHD_OK;
    in->used += (size_t)*ret_n;
    r = take_items(c, in->data, in->used, &taken, &need, e);
    if (r == SHD_OK && c->state != CONN_CLOSED)
        buffer_take(c->all, in, taken);
    return r;
}

static int read_more(struct conn *c, ssize_t *ret_n, struct shd_err *e)
{
    struct conns *all = c->all;
    size_t taken = 0, need = 0;
    *ret_n = receive(c, all->input, INPUT_BYTES);
    if (*ret_n <= 0)
        return SHD_OK;
    const size_t bytes = (size_t)*ret_n;
    const int r = take_items(c, all->input, bytes, &taken, &need, e);
    if (r != SHD_OK || c->state == CONN_CLOSED || taken == bytes)
        return r;
    if (!buffer_put(all, &c->in, all->input + taken, bytes - taken))
        return err_set(e, SHD_ENOMEM, "no memory for a message of %zu bytes", need);
    return SHD_OK;
}

static void conn_read(struct conn *c)
{
    struct shd_err e = { 0 };
    ssize_t n = 0;
    c->reading = true;
    const int r = c->in.used > 0 ? read_rest(c, &n, &e) : read_more(c, &n, &e);
    c->reading = false;
    const int error = errno;
    if (c->state != CONN_CLOSED)
        conn_flush(c);
    if (c->state == CONN_CLOSED)
        return;
    if (r != SHD_OK)
        conn_end(c, e.text);
    else if (n == 0)
        conn_end(c, "it hung up");
    else if (n < 0 && error != EAGAIN)
        conn_end(c, strerror(error));
}

static void conn_event(uv_poll_t *poll, int status, int events)
{
    struct conn *c = poll->data;
    if (status < 0) {
        conn_end(c, uv_strerror(status));
        return;
    }
    if ((events & UV_WRITABLE) != 0)
        conn_flush(c);
    if (c->state != CONN_CLOSED && (events & UV_READABLE) != 0)
        conn_read(c);
    else if (c->state != CONN_CLOSED && (events & UV_DISCONNECT) != 0)
        conn_end(c, "it hung up");
}

/* -- Waiting for Hello --------------------------------------------------------------------------
 */

static struct conn *oldest_waiting(struct conns *all, const uid_t *uid, uint32_t *ret_count)
{
    struct conn *oldest = NULL;
    *ret_count = 0;
    for (uint32_t i = 0; i < CONNS_MAX; i++) {
        struct conn *c = &all->items[i];
        if (!is_open(c) || c->admitted || (uid != NULL && c->uid != *uid))
            continue;
        ++*ret_count;
        if (oldest == NULL || c->since_ns < oldest->since_ns)
            oldest = c;
    }
    return oldest;
}

bool conns_push_out(struct conns *all)
{
    uint32_t count;
    struct conn *oldest = oldest_waiting(all, NULL, &count);
    if (oldest != NULL)
        conn_end(oldest, "others wait, and it has said no Hello");
    return oldest != NULL;
}

/* One more of uid is about to wait. */
static void make_room(struct conns *all, uid_t uid)
{
    uint32_t count;
    if (all->waiting < WAITING_MAX) /* nobody can have more */
        return;
    struct conn *oldest = oldest_waiting(all, &uid, &count);
    if (count >= WAITING_MAX)
        conn_end(oldest, "its user has too many that have said no Hello");
    else if (all->waiting >= CONNS_WAITING_MAX - CLOSING_MAX)
        conns_push_out(all);
}

static void sweep(uv_timer_t *timer)
{
    struct conns *all = timer->data;
    const uint64_t now_ns = uv_hrtime();
    for (uint32_t i = 0; i < CONNS_MAX && all->waiting > 0; i++) {
        struct conn *c = &all->items[i];
        if (is_open(c) && !c->admitted && now_ns - c->since_ns >= HELLO_NS)
            conn_end(c, "it has said no Hello for 5 s");
    }
    if (all->waiting == 0)
        uv_timer_stop(timer);
}

static void begin_waiting(struct conn *c)
{
    c->admitted = false;
    c->since_ns = uv_hrtime();
    if (c->all->waiting++ == 0)
        uv_timer_start(&c->all->timer, sweep, SWEEP_MS, SWEEP_MS);
}

void conn_admit(struct conns *all, uint64_t id, bool admitted)
{
    struct conn *c = conn_of(all, id);
    if (c == NULL || c->admitted == admitted)
        return;
    if (!admitted) {
        begin_waiting(c);
        return;
    }
    c->admitted = true;
    all->waiting--;
}

static size_t kept_bytes(const struct conn *c)
{
    return c->in.capacity + c->out.capacity;
}

/* All together keep more than they may: who keeps most has to go. */
static void relieve(uv_prepare_t *prepare)
{
    struct conns *all = prepare->data;
    struct conn *most = NULL;
    if (all->kept_bytes <= KEPT_BYTES_MAX) {
        uv_prepare_stop(prepare);
        return;
    }
    for (uint32_t i = 0; i < CONNS_MAX; i++) {
        struct conn *c = &all->items[i];
        if (is_open(c) && (most == NULL || kept_bytes(c) > kept_bytes(most)))
            most = c;
    }
    if (most != NULL)
        conn_end(most, "of all it has most unread or unfinished, and that is too much");
}

/* -- Beginning and ending -----------------------------------------------------------------------
 */

static int say_opening(struct conn *c, struct shd_err *e)
{
    uint8_t opening[ZMTP_OPENING_BYTES];
    zmtp_opening(opening);
    return conn_put(c, opening, sizeof opening, NULL, 0) ? SHD_OK
                                                         : err_set(e, SHD_EGONE, "it hung up");
}

int conn_new(struct conns *all, int fd, uid_t uid, struct shd_err *e)
{
    make_room(all, uid);
    struct conn *c = NULL;
    for (uint32_t i = 0; i < CONNS_MAX && c == NULL; i++)
        if (all->items[i].state == CONN_FREE)
            c = &all->items[i];
    const int r = c == NULL ? SHD_EBUSY : uv_poll_init(all->loop, &c->poll, fd);
    if (c == NULL || r < 0) {
        close(fd);
        return err_set(e, SHD_EBUSY, "no place for a connection: %s",
                       c == NULL ? "all are taken" : uv_strerror(r));
    }
    c->all = all;
    c->state = CONN_GREETING;
    c->id = ++all->epoch * CONNS_MAX + (uint64_t)(c - all->items);
    c->fd = fd;
    c->uid = uid;
    c->poll.data = c;
    all->used++;
    begin_waiting(c);
    watch(c);
    const int said = say_opening(c, e);
    if (said != SHD_OK)
        conn_close(c);
    return said;
}

int conns_new(uv_loop_t *loop, const struct conn_events *events, void *ctx,
              struct conns **ret_conns, struct shd_err *e)
{
    struct conns *all = sys_calloc(1, sizeof *all);
    if (all == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for connections");
    *all = (struct conns){ .events = events, .ctx = ctx, .loop = loop };
    all->items = sys_calloc(CONNS_MAX, sizeof *all->items);
    all->input = sys_malloc(INPUT_BYTES);
    if (all->items == NULL || all->input == NULL) {
        conns_free(all);
        return err_set(e, SHD_ENOMEM, "no memory for %u connections", CONNS_MAX);
    }
    uv_timer_init(loop, &all->timer);
    uv_prepare_init(loop, &all->prepare);
    all->timer.data = all->prepare.data = all;
    all->handles_ready = true;
    *ret_conns = all;
    return SHD_OK;
}

void conns_free(struct conns *all)
{
    if (all == NULL)
        return;
    for (uint32_t i = 0; all->items != NULL && i < CONNS_MAX; i++)
        if (is_open(&all->items[i]))
            conn_close(&all->items[i]);
    if (all->handles_ready) {
        uv_close((uv_handle_t *)&all->timer, NULL);
        uv_close((uv_handle_t *)&all->prepare, NULL);
        uv_run(all->loop, UV_RUN_NOWAIT); /* all of them must end before their memory */
    }
    CHECK(all->used == 0);
    free(all->items);
    free(all->input);
    free(all);
}
