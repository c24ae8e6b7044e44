/* See wire.h. One check (wire_check()) serves both directions, so that a sender learns of a bad
 * value by its name before its peer does. */
#include "proto/wire/wire.h"

#include <assert.h>
#include <inttypes.h>
#include <string.h>

#include "proto/base/check.h"
#include "proto/wire/wire_message.h"
#include "proto/wire/wire_tables.h"

static_assert(SHD__REQUEST__BODY_FETCH - SHD__REQUEST__BODY_HELLO == WIRE_FETCH,
              "a tag is left out");
static_assert(SHD__REPLY__BODY_FETCHED - SHD__REPLY__BODY_WELCOME + 1 == WIRE_FETCHED,
              "a tag is left out");

const char *wire_request_name(enum wire_request_type type)
{
    static const char *const names[] = {
#define REQUEST_NAME(NAME, name) [WIRE_##NAME] = #NAME,
        WIRE_REQUEST_MAP(REQUEST_NAME)
#undef REQUEST_NAME
    };
    CHECK((unsigned)type < WIRE_REQUEST_TYPES);
    return names[type];
}

/* -- Requests -------------------------------------------------------------------------------- */

static enum wire_request_type request_type(const Shd__Request *m)
{
    return m->body_case - SHD__REQUEST__BODY_HELLO;
}

static int request_check(const Shd__Request *m, struct shd_err *e)
{
    int r = wire_unknown_check("request", &m->base, e);
    if (r == SHD_OK && m->body_case == SHD__REQUEST__BODY__NOT_SET)
        r = err_set(e, SHD_EPROTO, "request %" PRIu64 " has no body", m->seq);
    if (r == SHD_OK) /* every member of the union is a message */
        r = wire_unknown_check(wire_request_name(request_type(m)), &m->hello->base, e);
    return r == SHD_OK ? wire_check(&wire_requests[request_type(m)], &m->hello->base, e) : r;
}

int wire_request_unpack(const void *frame, size_t bytes, struct wire_arena *arena,
                        struct wire_request *ret_request, struct shd_err *e)
{
    const size_t used = arena->used;
    ProtobufCMessage *decoded;
    int r = wire_decode(&shd__request__descriptor, frame, bytes, arena, &decoded, e);
    if (r != SHD_OK)
        return r;
    const Shd__Request *m = (const Shd__Request *)decoded;
    r = request_check(m, e);
    if (r != SHD_OK) {
        arena->used = used;
        return r;
    }
    struct wire_request *q = ret_request;
    q->seq = m->seq;
    q->session = m->session;
    q->type = request_type(m);
    wire_take(&wire_requests[q->type], &m->hello->base, &q->hello);
    if (q->type == WIRE_RETURN && q->return_grad.dtype == 0)
        q->return_grad.dtype = SHD_F32; /* of no gradient; what is handed on is always valid */
    return SHD_OK;
}

int wire_request_pack(const struct wire_request *request, void *buf, size_t capacity,
                      size_t *ret_bytes, struct shd_err *e)
{
    CHECK((unsigned)request->type < WIRE_REQUEST_TYPES);
    struct wire_parts parts;
    Shd__Request m = SHD__REQUEST__INIT;
    wire_put(&wire_requests[request->type], &request->hello, &parts);
    m.seq = request->seq;
    m.session = request->session;
    m.body_case = SHD__REQUEST__BODY_HELLO + request->type;
    m.hello = (Shd__Hello *)&parts.body;
    const int r = wire_check(&wire_requests[request->type], &parts.body.base, e);
    return r == SHD_OK ? wire_encode(&m.base, buf, capacity, ret_bytes, e) : r;
}

/* -- Replies --------------------------------------------------------------------------------- */

/* Text of an error, which ends up on terminals: cut to what a struct shd_err holds, control
 * characters replaced. An error is not refused for how it is spelt. */
static void text_clean(char *text)
{
    size_t i = 0;
    for (; text[i] != 0 && i < SHD_ERR_TEXT_BYTES - 1; i++)
        if ((unsigned char)text[i] < 0x20 || text[i] == 0x7f)
            text[i] = '?';
    if (text[i] != 0)
        text[i] = 0;
}

static enum wire_reply_type reply_type(const Shd__Reply *m)
{
    const bool empty = m->body_case == SHD__REPLY__BODY__NOT_SET;
    return empty ? WIRE_REPLY_NONE : m->body_case - SHD__REPLY__BODY_WELCOME + WIRE_WELCOME;
}

static int reply_check(const Shd__Reply *m, struct shd_err *e)
{
    const struct wire_message *t = &wire_replies[reply_type(m)];
    if (m->layout != 0)
        return err_set(e, SHD_ERANGE, "reply.layout is %" PRIu64 ", this build knows 0", m->layout);
    if (m->status == SHD_OK && m->text[0] != 0)
        return err_set(e, SHD_EPROTO, "reply has status SHD_OK and the text '%.40s'", m->text);
    if (!status_known(m->status))
        return err_set(e, SHD_ERANGE, "reply.status is %d, an unknown code", m->status);
    int r = wire_unknown_check("reply", &m->base, e);
    if (r == SHD_OK && reply_type(m) != WIRE_REPLY_NONE)
        r = wire_unknown_check(t->name, &m->welcome->base, e);
    if (r == SHD_OK && reply_type(m) != WIRE_REPLY_NONE)
        r = wire_check(t, &m->welcome->base, e);
    return r;
}

int wire_reply_unpack(const void *frame, size_t bytes, struct wire_arena *arena,
                      struct wire_reply *ret_reply, struct shd_err *e)
{
    const size_t used = arena->used;
    ProtobufCMessage *decoded;
    int r = wire_decode(&shd__reply__descriptor, frame, bytes, arena, &decoded, e);
    if (r != SHD_OK)
        return r;
    const Shd__Reply *m = (const Shd__Reply *)decoded;
    if (m->text[0] != 0) /* then it is in the arena, not protobuf-c's constant "" */
        text_clean(m->text);
    r = reply_check(m, e);
    if (r != SHD_OK) {
        arena->used = used;
        return r;
    }
    ret_reply->seq = m->seq;
    ret_reply->status = m->status;
    ret_reply->text = m->text;
    ret_reply->type = reply_type(m);
    if (ret_reply->type != WIRE_REPLY_NONE)
        wire_take(&wire_replies[ret_reply->type], &m->welcome->base, &ret_reply->welcome);
    return SHD_OK;
}

int wire_reply_pack(const struct wire_reply *reply, void *buf, size_t capacity, size_t *ret_bytes,
                    struct shd_err *e)
{
    CHECK((unsigned)reply->type < WIRE_REPLY_TYPES);
    char text[SHD_ERR_TEXT_BYTES];
    const bool told = reply->status != SHD_OK && reply->text != NULL;
    const size_t text_bytes = told ? strnlen(reply->text, sizeof text - 1) : 0;
    if (told)
        memcpy(text, reply->text, text_bytes);
    text[text_bytes] = 0;
    text_clean(text);
    struct wire_parts parts;
    Shd__Reply m = SHD__REPLY__INIT;
    m.seq = reply->seq;
    m.status = reply->status;
    m.text = text;
    if (reply->type != WIRE_REPLY_NONE) {
        wire_put(&wire_replies[reply->type], &reply->welcome, &parts);
        m.body_case = SHD__REPLY__BODY_WELCOME + reply->type - WIRE_WELCOME;
        m.welcome = (Shd__Welcome *)&parts.body;
    }
    const int r = reply_check(&m, e);
    return r == SHD_OK ? wire_encode(&m.base, buf, capacity, ret_bytes, e) : r;
}
