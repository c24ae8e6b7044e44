/* Joining with far owners; see nccl_join.h.
 *
 * Happy path: two ids, both links begun here as rank 0 while Join carries the ids to the owner,
 * which begins them as rank 1; the answer says that they stand there, then they do here. On a link
 * that comes up again everything on the old links ends first, so that what is asked again can be
 * queued again. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "client/paths/map.h"
#include "client/paths/nccl_join.h"
#include "client/paths/whole.h"
#include "client/session/gpu.h"
#include "client/session/hub.h"
#include "client/session/link.h"
#include "kernels/kern.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"

#define END_NS  (30 * NS_PER_S) /* more than an abort takes */
#define POLL_NS (2 * NS_PER_MS)

/* -- Who is far -------------------------------------------------------------------------------- */

int nccl_check(const struct shd_model *m, struct shd_err *e)
{
    bool any = false;
    if (m->map == NULL)
        return err_set(e, SHD_ENOTSUP,
                       "path nccl: at \"local:\" the owners are in this process; take auto or map");
    if (!m->session->on_gpu)
        return err_set(e, SHD_ENOTSUP,
                       "path nccl is between GPUs, this worker's arrays are in host memory: take "
                       "auto or copy");
    for (uint32_t i = 0; i < m->map->owner_count; i++) {
        if (!m->map->owners[i].layout.on_gpu)
            return err_set(e, SHD_ENOTSUP,
                           "path nccl is between GPUs, daemon %s has model '%s' in host memory: "
                           "take auto or copy",
                           m->session->hub->links[i].device, m->spec->name);
        any = any || whole_is_far(m, &m->map->owners[i]);
    }
    if (any)
        return SHD_OK;
    return err_set(
        e, SHD_ENOTSUP,
        "path nccl: model '%s' is in the memory of this worker's own GPU: take auto, map "
        "or copy",
        m->spec->name);
}

bool nccl_needed(const struct shd_model *m)
{
    for (uint32_t i = 0; m->map != NULL && i < m->map->owner_count; i++)
        if (whole_is_far(m, &m->map->owners[i]) &&
            !gpu_reaches(m->session, m->map->owners[i].layout.uuid))
            return true;
    return false;
}

/* -- Transfers --------------------------------------------------------------------------------- */

bool nccl_ended(struct nccl_owner *owner, const struct comm_job *job)
{
    if (job->status == SHD_OK && job->turn > 0) {
        owner->turned = true;
        owner->why = (struct shd_err){ 0 };
    }
    if (job->status == SHD_OK || job->status == SHD_ETIMEDOUT || job->ended || owner->broken)
        return false;
    owner->broken = true;
    if (!job->remote || owner->why.code == SHD_OK)
        owner->why = job->why; /* that the peer broke off says less than why this side did */
    return true;
}

/* On the communicator thread. */
static void transfer_done(struct comm_job *job)
{
    struct nccl_transfer *t = (struct nccl_transfer *)(void *)((char *)job -
                                                               offsetof(struct nccl_transfer, job));
    struct nccl_model *n = t->of;
    pthread_mutex_lock(&n->lock);
    t->busy = false;
    if (nccl_ended(t->owner, job))
        atomic_store(&n->broken, true);
    pthread_cond_broadcast(&n->change);
    pthread_mutex_unlock(&n->lock);
}

static void begin(struct nccl_model *n, struct nccl_owner *owner, struct nccl_transfer *t)
{
    t->of = n;
    t->owner = owner;
    t->job.done = transfer_done;
    pthread_mutex_lock(&n->lock);
    CHECK(!t->busy);
    t->busy = true;
    pthread_mutex_unlock(&n->lock);
}

void nccl_queue(struct nccl_owner *owner, struct comm_link *link, struct nccl_transfer *t)
{
    CHECK(link != NULL);
    begin(t->of, owner, t);
    comm_queue(link, &t->job);
}

bool nccl_wait(struct nccl_model *n, const struct nccl_transfer *t, uint64_t timeout_ns)
{
    const uint64_t end_ns = clock_now_ns() + timeout_ns;
    const struct timespec at = clock_timespec(end_ns);
    pthread_mutex_lock(&n->lock);
    while (t->busy && timeout_ns > 0 && clock_now_ns() < end_ns)
        pthread_cond_timedwait(&n->change, &n->lock, &at);
    const bool done = !t->busy;
    pthread_mutex_unlock(&n->lock);
    return done;
}

/* -- One owner --------------------------------------------------------------------------------- */

/* Wait until the communicator thread has let go of all that was this owner's. */
static int end_links(struct nccl_model *n, uint32_t i, struct shd_err *e)
{
    struct nccl_owner *o = &n->owners[i];
    bool done = true;
    comm_link_end(o->down);
    comm_link_end(o->up);
    o->down = o->up = NULL;
    o->connection = 0;
    done = nccl_wait(n, &o->down_open, END_NS) && nccl_wait(n, &o->up_open, END_NS);
    for (uint32_t s = 0; s < n->slot_count; s++)
        done = done && nccl_wait(n, &n->slots[s].pieces[i].in, END_NS);
    for (uint32_t s = 0; s < SHD_SLOTS_MAX; s++)
        done = done && nccl_wait(n, &n->sends[(size_t)s * n->owner_count + i], END_NS);
    return done ? SHD_OK : err_set(e, SHD_EIO, "NCCL does not let go of an old link");
}

static int begin_link(struct nccl_model *n, struct nccl_owner *owner, const struct nccl_id *id,
                      struct nccl_transfer *open, struct comm_link **ret_link, struct shd_err *e)
{
    open->job = (struct comm_job){ .timeout_ns = n->model->session->timeout_ns };
    begin(n, owner, open);
    const int r = comm_link_new(n->comm, id, /* rank= */ 0, &open->job, ret_link, e);
    if (r != SHD_OK)
        open->busy = false; /* nobody else knows of it */
    return r;
}

/* A daemon that lives, and with which one link after the other breaks, is given up: another join
 * would not help. */
static int count_mend(struct nccl_model *n, const struct link *link, struct shd_err *e)
{
    struct nccl_owner *o = &n->owners[link->index];
    pthread_mutex_lock(&n->lock);
    const bool again = o->pid == link->pid && !o->turned;
    const struct shd_err why = o->why;
    o->turned = false;
    pthread_mutex_unlock(&n->lock);
    o->mends = again ? o->mends + 1 : 0;
    if (o->mends <= NCCL_MENDS_MAX)
        return SHD_OK;
    return link_err(link, SHD_EIO, e, "is there, but not by NCCL, joined anew %u times: %s",
                    NCCL_MENDS_MAX, why.code != SHD_OK ? why.text : link->last.text);
}

/* connection: this link's, so that a Join that is sent again there says the same. */
static int begin_join(struct nccl_model *n, uint32_t i, uint64_t connection, struct shd_err *e)
{
    struct nccl_owner *o = &n->owners[i];
    const struct link *link = &n->model->session->hub->links[i];
    int r = end_links(n, i, e);
    if (r == SHD_OK)
        r = count_mend(n, link, e);
    o->pid = link->pid;
    o->broken = false; /* nothing of the old ones is left that could say so */
    if (r == SHD_OK)
        r = comm_make_ids(n->comm, o->ids, ARRAY_SIZE(o->ids), e);
    if (r == SHD_OK)
        r = begin_link(n, o, &o->ids[0], &o->down_open, &o->down, e);
    if (r == SHD_OK)
        r = begin_link(n, o, &o->ids[1], &o->up_open, &o->up, e);
    if (r != SHD_OK)
        return r;
    o->connection = connection;
    o->down_turn = o->up_turn = 0;
    o->epoch++;
    return SHD_OK;
}

static void fill_join(const struct nccl_model *n, uint32_t i, struct wire_request *ret_request)
{
    const struct nccl_owner *o = &n->owners[i];
    static_assert(sizeof(struct nccl_id) == WIRE_LINK_ID_BYTES, "nccl.h and the messages agree");
    ret_request->type = WIRE_JOIN;
    ret_request->join.model = n->model->map->owners[i].layout.handle;
    ret_request->join.timeout_ms = n->model->session->timeout_ns / NS_PER_MS;
    memcpy(ret_request->join.down, o->ids[0].bytes, sizeof o->ids[0].bytes);
    memcpy(ret_request->join.up, o->ids[1].bytes, sizeof o->ids[1].bytes);
}

static bool is_broken(struct nccl_model *n, uint32_t i, struct shd_err *ret_why)
{
    pthread_mutex_lock(&n->lock);
    const bool broken = n->owners[i].broken;
    *ret_why = n->owners[i].why;
    pthread_mutex_unlock(&n->lock);
    return broken;
}

/* The owner has answered that both links stand there; wait until they do here. */
static int end_join(struct nccl_model *n, struct link *link, struct shd_err *e)
{
    struct nccl_owner *o = &n->owners[link->index];
    const struct nccl_transfer *const opens[] = { &o->down_open, &o->up_open };
    for (size_t k = 0; k < ARRAY_SIZE(opens); k++) {
        if (!nccl_wait(n, opens[k], n->model->session->timeout_ns + NS_PER_S))
            return link_err(link, SHD_ETIMEDOUT, e, "is not reached by NCCL");
        if (opens[k]->job.status != SHD_OK)
            return link_err(link, opens[k]->job.status, e, "is not reached by NCCL: %s",
                            opens[k]->job.why.text);
    }
    return SHD_OK;
}

/* A link that broke here already will not stand: waiting for the owner's answer is over. */
static int look_at_links(void *ctx, struct link *link, struct shd_err *e)
{
    struct nccl_model *n = ctx;
    struct shd_err why;
    if (!is_broken(n, link->index, &why))
        return SHD_OK;
    return link_err(link, SHD_EGONE, e, "is not reached by NCCL: %s", why.text);
}

int nccl_reopen(struct shd_model *m, struct link *link, struct shd_err *e)
{
    struct wire_request request = { .seq = 0 };
    struct link_ask ask = { /* take= */ NULL, look_at_links, m->nccl };
    if (m->nccl == NULL || !m->nccl->owners[link->index].far)
        return SHD_OK;
    int r = begin_join(m->nccl, link->index, (uint64_t)link->epoch + 1, e);
    if (r != SHD_OK)
        return r;
    fill_join(m->nccl, link->index, &request);
    r = link_exchange(link, &request, &ask, e);
    if (r == SHD_OK)
        r = end_join(m->nccl, link, e);
    return r == SHD_EIO ? SHD_EGONE : r; /* NCCL's: again, as often as is counted */
}

static void look_at(struct nccl_model *n)
{
    struct shd_err why;
    if (n == NULL || !atomic_exchange(&n->broken, false))
        return;
    for (uint32_t i = 0; i < n->owner_count; i++) {
        struct link *link = &n->model->session->hub->links[i];
        if (link->state == LINK_UP && is_broken(n, i, &why))
            link_down(link, &why);
    }
}

void nccl_look(struct shd_model *m)
{
    look_at(m->nccl);
    look_at(m->nccl_joining);
}

/* -- All of them, at first --------------------------------------------------------------------- */

static int make_join(struct link *link, const struct call *call, struct wire_request *ret_request,
                     struct shd_err *e)
{
    struct nccl_model *n = call->ctx;
    const uint64_t connection = (uint64_t)link->epoch + 1;
    if (n->owners[link->index].connection != connection) {
        const int r = begin_join(n, link->index, connection, e);
        if (r != SHD_OK)
            return r;
    }
    fill_join(n, link->index, ret_request);
    return SHD_OK;
}

static void join_answered(struct link *link, const struct call *call,
                          const struct wire_reply *reply)
{
    struct nccl_model *n = call->ctx;
    struct nccl_owner *o = &n->owners[link->index];
    o->asked = false;
    o->refusal = (struct shd_err){ 0 };
    if (reply->status != SHD_OK)
        link_err(link, reply->status, &o->refusal, "refused Join: %s", reply->text);
}

static int ask_join(struct nccl_model *n, uint32_t i, struct shd_err *e)
{
    const struct call call = { .make = make_join, .fn = join_answered, .ctx = n };
    n->owners[i].asked = true;
    return hub_ask(&n->model->session->hub->links[i], &call, e);
}

/* A join that has ended stands, or failed. NCCL's failures are worth another connection
 * (count_mend() bounds how many), and so is the SHD_ETIMEDOUT of an owner that waited for this
 * process in vain. */
static int look_at_join(struct nccl_model *n, uint32_t i, struct shd_err *e)
{
    struct nccl_owner *o = &n->owners[i];
    struct link *link = &n->model->session->hub->links[i];
    struct shd_err why = o->refusal;
    if (o->asked || o->stands || !nccl_wait(n, &o->down_open, 0) || !nccl_wait(n, &o->up_open, 0))
        return SHD_OK;
    const bool late = why.code == SHD_ETIMEDOUT;
    const int r = why.code != SHD_OK ? why.code : end_join(n, link, &why);
    if (r == SHD_EIO || r == SHD_EGONE || late) {
        if (link->state == LINK_UP)
            link_down(link, &why);
        return ask_join(n, i, e);
    }
    o->stands = r == SHD_OK;
    return err_copy(&why, e);
}

static const struct link *find_missing(const struct nccl_model *n)
{
    for (uint32_t i = 0; i < n->owner_count; i++)
        if (n->owners[i].far && !n->owners[i].stands)
            return &n->model->session->hub->links[i];
    return NULL;
}

static int join_all(struct nccl_model *n, struct shd_err *e)
{
    struct hub *hub = n->model->session->hub;
    const struct link *missing;
    const uint64_t start_ns = clock_now_ns();
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < n->owner_count; i++)
        if (n->owners[i].far)
            r = ask_join(n, i, e);
    while (r == SHD_OK && (missing = find_missing(n)) != NULL) {
        if (clock_now_ns() >= hub_deadline_ns(hub, start_ns))
            return link_err(missing, SHD_ETIMEDOUT, e, "did not answer Join within %" PRIu64 " ms",
                            n->model->session->timeout_ns / NS_PER_MS);
        r = hub_poll(hub, POLL_NS, e);
        for (uint32_t i = 0; r == SHD_OK && i < n->owner_count; i++)
            if (n->owners[i].far)
                r = look_at_join(n, i, e);
    }
    return r;
}

static struct nccl_model *allocate(struct shd_model *m)
{
    const uint32_t owners = m->map->owner_count;
    struct nccl_model *n = sys_calloc(1, sizeof *n);
    if (n == NULL)
        return NULL;
    n->model = m;
    n->owner_count = owners;
    pthread_mutex_init(&n->lock, NULL);
    sys_condition(&n->change);
    n->owners = sys_calloc(owners, sizeof *n->owners);
    n->sends = sys_calloc((size_t)SHD_SLOTS_MAX * owners, sizeof *n->sends);
    if (n->owners != NULL && n->sends != NULL)
        return n;
    nccl_free(n);
    return NULL;
}

int nccl_new(struct shd_model *m, struct nccl_model **ret_nccl, struct shd_err *e)
{
    struct nccl_model *n = allocate(m);
    if (n == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for the NCCL path of %" PRIu32 " owners",
                       m->map->owner_count);
    n->in = buffers_for(m, sizeof(float));
    for (uint32_t i = 0; i < n->owner_count; i++)
        n->owners[i].far = whole_is_far(m, &m->map->owners[i]);
    int r = comm_new(m->session->ordinal, &n->comm, e);
    m->nccl_joining = n;
    if (r == SHD_OK)
        r = join_all(n, e);
    m->nccl_joining = NULL;
    if (r != SHD_OK) {
        nccl_free(n);
        if (e != NULL)
            err_prefix(e, "path nccl");
        return r;
    }
    *ret_nccl = n;
    return SHD_OK;
}

void nccl_free(struct nccl_model *n)
{
    if (n == NULL)
        return;
    hub_forget(n->model->session->hub, n);
    for (uint32_t i = 0; n->comm != NULL && i < n->owner_count; i++)
        while (end_links(n, i, /* e= */ NULL) != SHD_OK)
            continue; /* it writes to memory that is freed next */
    comm_free(n->comm);
    for (uint32_t i = 0; i < SHD_SLOTS_MAX; i++)
        buffer_free(&n->in, &n->out[i]);
    for (uint32_t i = 0; i < n->slot_count; i++)
        free(n->slots[i].pieces);
    pthread_cond_destroy(&n->change);
    pthread_mutex_destroy(&n->lock);
    free(n->slots);
    free(n->owners);
    free(n->sends);
    free(n);
}
