/* The communicator thread's work for one link; see comm.h and comm_link.h. */
#include "proto/gpu/comm_link.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "proto/base/check.h"
#include "proto/base/clock.h"

#define DRAIN_NS_MAX (10 * NS_PER_S) /* after an abort the device lets go of the memory */
#define MAX_CTAS     8               /* multiprocessors that one turn may take of the device */
#define STOPPED_NS   NS_PER_S        /* between two steps, many times what is between them */

static void begin(struct comm_link *l, struct comm_job *job)
{
    const uint64_t now_ns = clock_now_ns();
    l->deadline_ns = job->timeout_ns > 0 ? now_ns + job->timeout_ns : UINT64_MAX;
    atomic_store_explicit(&job->begun_ns, now_ns, memory_order_relaxed);
}

/* -- The libraries ----------------------------------------------------------------------------- */

static int take_context(struct comm *c, struct shd_err *e)
{
    const struct cuda *cuda;
    int r = cuda_load(&cuda, e);
    if (r == SHD_OK)
        r = cuda_result(cuda, cuda->cuDeviceGet(&c->device, (int)c->ordinal), e,
                        "cuDeviceGet of %" PRIu32, c->ordinal);
    if (r == SHD_OK)
        r = cuda_result(cuda, cuda->cuDevicePrimaryCtxRetain(&c->context, c->device), e,
                        "take the context of device %" PRIu32, c->ordinal);
    if (r != SHD_OK)
        return r;
    r = cuda_result(cuda, cuda->cuCtxSetCurrent(c->context), e, "cuCtxSetCurrent");
    if (r == SHD_OK)
        c->cuda = cuda;
    else
        cuda->cuDevicePrimaryCtxRelease(c->device);
    return r;
}

int comm_take_libraries(struct comm *c, struct shd_err *e)
{
    int r = c->cuda == NULL ? take_context(c, e) : SHD_OK;
    if (r == SHD_OK && c->nccl == NULL)
        r = nccl_load(&c->nccl, e);
    return r;
}

/* -- A link that breaks ------------------------------------------------------------------------ */

/* The job is done; or, unless broken is NULL, that link broke before. */
static void finish(struct comm_job *job, const struct comm_link *broken)
{
    job->status = broken != NULL ? broken->why.code : SHD_OK;
    job->ended = broken != NULL && broken->ended;
    job->remote = broken != NULL && broken->remote;
    job->why = broken != NULL ? broken->why : (struct shd_err){ 0 };
    job->next = NULL;
    job->done(job); /* *job may be gone from here on */
}

static void finish_all(struct comm_link *l)
{
    if (l->opened != NULL) {
        struct comm_job *opened = l->opened;
        l->opened = NULL;
        finish(opened, l);
    }
    while (l->queue != NULL) {
        struct comm_job *job = l->queue;
        l->queue = job->next;
        finish(job, l);
    }
}

/* End the link by the reason in l->why. */
static void break_link(struct comm_link *l)
{
    const struct comm *c = l->comm;
    CHECK(l->state != LINK_BROKEN && l->state != LINK_DRAINING && l->why.code != SHD_OK);
    if (l->nccl != NULL)
        c->nccl->comm_abort(l->nccl); /* whatever it says: this was the last call about it */
    l->nccl = NULL;
    l->state = LINK_BROKEN;
    if (l->event != NULL && c->cuda->cuEventRecord(l->event, l->stream) == CUDA_SUCCESS) {
        l->state = LINK_DRAINING;
        l->deadline_ns = clock_now_ns() + DRAIN_NS_MAX;
    }
}

static void give_up(struct comm_link *l)
{
    l->ended = true;
    err_set(&l->why, SHD_EGONE, "the link was given up");
    break_link(l);
}

static void step_draining(struct comm_link *l)
{
    if (l->comm->cuda->cuEventQuery(l->event) == CUDA_ERROR_NOT_READY &&
        clock_now_ns() < l->deadline_ns)
        return;
    l->state = LINK_BROKEN; /* or the device is stuck, which nothing here can mend */
}

void comm_link_free(struct comm_link *l)
{
    const struct cuda *cuda = l->comm->cuda;
    CHECK(l->nccl == NULL && l->queue == NULL && l->opened == NULL);
    if (l->event != NULL)
        cuda->cuEventDestroy(l->event);
    if (l->stream != NULL)
        cuda->cuStreamDestroy(l->stream);
    free(l);
}

/* -- Connecting -------------------------------------------------------------------------------- */

static int make_stream(struct comm_link *l, struct shd_err *e)
{
    const struct cuda *cuda = l->comm->cuda;
    const int r = cuda_result(cuda, cuda->cuStreamCreate(&l->stream, CU_STREAM_NON_BLOCKING), e,
                              "make a stream for NCCL");
    if (r != SHD_OK) {
        l->stream = NULL;
        return r;
    }
    const int made = cuda_result(cuda, cuda->cuEventCreate(&l->event, CU_EVENT_DISABLE_TIMING), e,
                                 "make an event for NCCL");
    l->event = made == SHD_OK ? l->event : NULL;
    return made;
}

static void step_new(struct comm_link *l)
{
    struct comm *c = l->comm;
    struct nccl_config config = { .size = sizeof config,
                                  .magic = NCCL_CONFIG_MAGIC,
                                  .version = NCCL_CONFIG_VERSION,
                                  .blocking = 0,
                                  .cga_cluster_size = NCCL_UNDEFINED,
                                  .min_ctas = NCCL_UNDEFINED,
                                  .max_ctas = MAX_CTAS,
                                  .split_share = NCCL_UNDEFINED,
                                  .traffic_class = NCCL_UNDEFINED };
    int r = comm_take_libraries(c, &l->why);
    if (r == SHD_OK)
        r = make_stream(l, &l->why);
    if (r == SHD_OK)
        r = nccl_result(c->nccl,
                        c->nccl->comm_init(&l->nccl, /* ranks= */ 2, l->id, l->rank, &config),
                        &l->why, "ncclCommInitRankConfig of rank %d", l->rank);
    if (r == SHD_OK) {
        begin(l, l->opened);
        l->state = LINK_INIT;
        return;
    }
    break_link(l);
}

/* NCCL's state of the link: NCCL_SUCCESS or NCCL_IN_PROGRESS; anything else broke it. */
static int look(struct comm_link *l, const char *what)
{
    const struct nccl *nccl = l->comm->nccl;
    int state = NCCL_SUCCESS;
    int r = nccl_result(nccl, nccl->comm_async_error(l->nccl, &state), &l->why,
                        "ncclCommGetAsyncError");
    if (r == SHD_OK)
        r = nccl_result(nccl, state, &l->why, "%s", what);
    if (r == SHD_OK)
        return state;
    l->remote = state == NCCL_REMOTE_ERROR;
    break_link(l);
    return NCCL_REMOTE_ERROR;
}

static void check_deadline(struct comm_link *l, uint64_t timeout_ns, const char *what)
{
    if (clock_now_ns() < l->deadline_ns)
        return;
    err_set(&l->why, SHD_ETIMEDOUT, "%s: not done within %" PRIu64 " ms: is the peer there?", what,
            timeout_ns / NS_PER_MS);
    break_link(l);
}

static void step_init(struct comm_link *l)
{
    static const char what[] = "connect by NCCL";
    struct comm_job *opened = l->opened;
    const int state = look(l, what);
    if (state == NCCL_IN_PROGRESS)
        check_deadline(l, opened->timeout_ns, what);
    if (state != NCCL_SUCCESS)
        return;
    l->state = LINK_READY;
    l->opened = NULL;
    finish(opened, NULL);
}

/* -- Turns ------------------------------------------------------------------------------------- */

static const char *way_name(const struct comm_job *job)
{
    return job->way == COMM_SEND ? "send by NCCL" : "receive by NCCL";
}

static bool gate_open(const struct comm_gate *gate)
{
    return gate->board == NULL || board_reached(gate->board, gate->unit, gate->step);
}

static int issue(const struct comm_link *l, const struct comm_job *job)
{
    const struct nccl *nccl = l->comm->nccl;
    const int peer = 1 - l->rank;
    int r = nccl->group_start();
    if (r != NCCL_SUCCESS)
        return r;
    if (job->way == COMM_SEND)
        r = nccl->send(job->memory, job->bytes, NCCL_UINT8, peer, l->nccl, l->stream);
    else
        r = nccl->recv(job->memory, job->bytes, NCCL_UINT8, peer, l->nccl, l->stream);
    const int ended = nccl->group_end();
    return r == NCCL_SUCCESS || r == NCCL_IN_PROGRESS ? ended : r;
}

static void step_ready(struct comm_link *l)
{
    struct comm_job *job = l->queue;
    if (job == NULL || job->turn != l->turn || !gate_open(&job->gate))
        return;
    if (job->gate.board != NULL)
        job->version = board_version(job->gate.board, job->gate.unit);
    begin(l, job);
    const int issued = issue(l, job);
    l->remote = issued == NCCL_REMOTE_ERROR;
    if (nccl_result(l->comm->nccl, issued, &l->why, "%s %" PRIu64 " bytes", way_name(job),
                    job->bytes) == SHD_OK)
        l->state = LINK_ISSUED;
    else
        break_link(l);
}

static void step_issued(struct comm_link *l)
{
    const struct cuda *cuda = l->comm->cuda;
    const int state = look(l, way_name(l->queue));
    if (state == NCCL_IN_PROGRESS)
        check_deadline(l, l->queue->timeout_ns, way_name(l->queue));
    if (state != NCCL_SUCCESS)
        return;
    if (cuda_result(cuda, cuda->cuEventRecord(l->event, l->stream), &l->why,
                    "mark the end of a transfer") == SHD_OK)
        l->state = LINK_RUNNING;
    else
        break_link(l);
}

static void step_running(struct comm_link *l)
{
    const struct cuda *cuda = l->comm->cuda;
    struct comm_job *job = l->queue;
    const CUresult r = cuda->cuEventQuery(l->event);
    if (r == CUDA_ERROR_NOT_READY) {
        if (look(l, way_name(job)) == NCCL_SUCCESS)
            check_deadline(l, job->timeout_ns, way_name(job));
        return;
    }
    if (cuda_result(cuda, r, &l->why, "%s %" PRIu64 " bytes", way_name(job), job->bytes) !=
        SHD_OK) {
        break_link(l);
        return;
    }
    l->state = LINK_READY;
    l->turn++;
    l->queue = job->next;
    finish(job, NULL);
}

/* -- All of it ----------------------------------------------------------------------------------
 */

/* Time in which this process was stopped is added to the time that the peer is given. */
static void look_at_clock(struct comm_link *l)
{
    const uint64_t now_ns = clock_now_ns(), gap_ns = now_ns - l->looked_ns;
    if (l->looked_ns != 0 && gap_ns >= STOPPED_NS && l->deadline_ns < UINT64_MAX - gap_ns)
        l->deadline_ns += gap_ns;
    l->looked_ns = now_ns;
}

void comm_link_step(struct comm_link *l)
{
    static void (*const steps[])(struct comm_link *) = {
        [LINK_NEW] = step_new,       [LINK_INIT] = step_init,       [LINK_READY] = step_ready,
        [LINK_ISSUED] = step_issued, [LINK_RUNNING] = step_running, [LINK_DRAINING] = step_draining,
    };
    look_at_clock(l);
    if (l->end_seen && l->state != LINK_DRAINING && l->state != LINK_BROKEN)
        give_up(l);
    else if (l->state != LINK_BROKEN)
        steps[l->state](l);
    if (l->state == LINK_BROKEN)
        finish_all(l);
}

bool comm_link_gated(const struct comm_link *l)
{
    return l->state == LINK_READY && l->queue != NULL && l->queue->turn == l->turn;
}

bool comm_link_busy(const struct comm_link *l)
{
    if (l->state != LINK_READY && l->state != LINK_BROKEN)
        return true;
    return comm_link_gated(l) && gate_open(&l->queue->gate);
}
