/* Sessions: connect, close, look. See client/shd.h. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "client/paths/local.h"
#include "client/paths/path.h"
#include "client/paths/place.h"
#include "client/paths/remote.h"
#include "client/run/fork.h"
#include "client/session/blame.h"
#include "client/session/gpu.h"
#include "client/session/hub_open.h"
#include "client/session/session.h"
#include "kernels/kern.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"

#define TIMEOUT_MS_DEFAULT UINT64_C(60000)
#define TIMEOUT_MS_MAX     (UINT64_C(1000) * 3600 * 24 * 365)
#define THREADS_MAX        256u
#define TIMEOUT_ENV        "SHARDD_TIMEOUT"

const char *shd_version(void)
{
    return SHD_VERSION;
}

const char *shd_status_name(int code)
{
    return status_name(code);
}

static int check_name(const char *name, struct shd_err *e)
{
    if (strlen(name) >= WIRE_NAME_BYTES_MAX)
        return err_set(e, SHD_ERANGE, "session name has %zu bytes, at most %u", strlen(name),
                       WIRE_NAME_BYTES_MAX - 1);
    for (const char *c = name; *c != '\0'; c++)
        if (*c < ' ' || *c > '~')
            return err_set(e, SHD_EINVAL, "session name has byte %#x: only printable ASCII",
                           (unsigned)(unsigned char)*c);
    return SHD_OK;
}

static int check_options(const struct shd_options *o, struct shd_err *e)
{
    if (o->slots > SHD_SLOTS_MAX)
        return err_set(e, SHD_ERANGE, "%" PRIu32 " slots asked for, at most %u", o->slots,
                       SHD_SLOTS_MAX);
    if (o->threads > THREADS_MAX)
        return err_set(e, SHD_ERANGE, "%" PRIu32 " threads asked for, at most %u", o->threads,
                       THREADS_MAX);
    if (o->timeout_ms > TIMEOUT_MS_MAX)
        return err_set(e, SHD_ERANGE, "timeout of %" PRIu64 " ms, at most %" PRIu64, o->timeout_ms,
                       TIMEOUT_MS_MAX);
    return o->name != NULL ? check_name(o->name, e) : SHD_OK;
}

static int take_options(const struct shd_options *options, struct shd_options *ret_options,
                        struct shd_err *e)
{
    if (options == NULL)
        return SHD_OK;
    const int r = sized_take(ret_options, sizeof *ret_options, options,
                             offsetof(struct shd_options, address) + sizeof options->address,
                             "shd_options", e);
    return r == SHD_OK ? check_options(ret_options, e) : r;
}

/* The program's name, with what a message may not hold replaced. */
static void default_name(char ret_name[WIRE_NAME_BYTES_MAX])
{
    size_t i = 0;
    for (const char *c = program_invocation_short_name; *c != '\0' && i < WIRE_NAME_BYTES_MAX - 1;
         c++)
        ret_name[i++] = *c > ' ' && *c <= '~' ? *c : '_';
    ret_name[i] = '\0';
}

static int connect_owners(struct shd_session *s, const struct shd_options *o, struct shd_err *e)
{
    struct address address;
    char name[WIRE_NAME_BYTES_MAX];
    default_name(name);
    int r = address_parse(o->address, &address, e);
    if (r != SHD_OK)
        return r;
    if (address.local) {
        s->control = &control_local;
        s->reader = &reader_local;
        s->idle = (struct idle){ .fn = o->idle, .ctx = o->idle_ctx };
        r = session_kern(s, o->threads > 0 ? o->threads : 1, e);
    } else {
        s->control = &control_remote;
        s->reader = &reader_mapped;
        const struct hub_options options = { .name = o->name != NULL ? o->name : name,
                                             .role = o->reader ? WIRE_READER : WIRE_TRAINER,
                                             .timeout_ns = s->timeout_ns,
                                             .patient = o->timeout_ms == 0,
                                             .idle = { .fn = o->idle, .ctx = o->idle_ctx },
                                             .events = { o->event, o->event_ctx } };
        r = hub_new(&address, &options, &s->hub, e);
    }
    if (r == SHD_OK && s->hub != NULL)
        r = remote_attach(s, (struct blame_sink){ o->waits, o->waits_ctx }, e);
    address_free(&address);
    return r;
}

static void session_free(struct shd_session *s)
{
    hub_free(s->hub);
    blame_free(s->blame);
    gpu_close(s);
    if (s->kern != NULL)
        s->kern->ops->free(s->kern);
    free(s);
}

/* The program has set no limit: the user may. */
static int take_timeout(struct shd_options *o, struct shd_err *e)
{
    const char *text = getenv(TIMEOUT_ENV);
    char *end;
    if (o->timeout_ms > 0 || text == NULL || text[0] == '\0')
        return SHD_OK;
    const uint64_t seconds = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end != '\0' || seconds > TIMEOUT_MS_MAX / 1000)
        return err_set(e, SHD_EINVAL,
                       TIMEOUT_ENV " is '%.40s': a number of seconds up to %" PRIu64
                                   " is wanted, as 60; 0: no limit",
                       text, TIMEOUT_MS_MAX / 1000);
    o->timeout_ms = seconds * 1000;
    return SHD_OK;
}

int shd_connect(const struct shd_options *options, shd_session **ret_session, struct shd_err *e)
{
    struct shd_options o = { 0 };
    int r = take_options(options, &o, e);
    if (r == SHD_OK)
        r = take_timeout(&o, e);
    if (r != SHD_OK)
        return r;
    struct shd_session *s = sys_calloc(1, sizeof *s);
    if (s == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a session");
    s->slots = o.slots;
    s->reads = o.reader;
    s->timeout_ns = (o.timeout_ms > 0 ? o.timeout_ms : TIMEOUT_MS_DEFAULT) * NS_PER_MS;
    r = gpu_parse(o.device, &s->on_gpu, &s->ordinal, e);
    if (r == SHD_OK && s->on_gpu)
        r = gpu_open(s->ordinal, &s->kern, e);
    if (r == SHD_OK)
        r = connect_owners(s, &o, e);
    if (r == SHD_OK)
        r = fork_add(s, e);
    if (r != SHD_OK)
        session_free(s);
    else
        *ret_session = s;
    return r;
}

void shd_close(shd_session *s)
{
    if (s == NULL || s->left) /* of a child the memory stays: threads that used it are not there */
        return;
    fork_drop(s);
    while (s->models != NULL)
        shd_model_close(s->models);
    session_free(s);
}

uint32_t shd_owners(const shd_session *s)
{
    return s->hub != NULL ? s->hub->owner_count : 1;
}

int shd_stats(const shd_session *s, struct shd_stats *ret_stats, struct shd_err *e)
{
    const struct shd_stats stats = {
        .wait_ns = s->wait_ns,
        .bytes_mapped = s->bytes_mapped,
        .bytes_copied = s->bytes_copied,
        .units_acquired = s->units_acquired,
        .units_returned = s->units_returned,
        .requests = s->hub != NULL ? s->hub->requests : 0,
        .bytes_fetched = s->bytes_fetched,
        .bytes_returned = s->bytes_returned,
        .live_bytes_max = s->live_bytes_max,
        .plan_misses = s->plan_misses,
        .bytes_unpinned = s->bytes_unpinned,
    };
    const int r = sized_check(ret_stats, sizeof stats, "shd_stats", e);
    if (r == SHD_OK)
        sized_give(ret_stats, &stats);
    return r;
}

int shd_status(shd_session *s, uint32_t owner, char **ret_json, struct shd_err *e)
{
    if (owner >= shd_owners(s))
        return err_set(e, SHD_ERANGE, "owner %" PRIu32 " of %" PRIu32, owner, shd_owners(s));
    const int r = session_check(s, e);
    return r != SHD_OK ? r : s->control->status(s, owner, ret_json, e);
}
