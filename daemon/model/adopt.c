/* See adopt.h. */
#include "daemon/model/adopt.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <uv.h>

#include "daemon/base/keeper.h"
#include "daemon/base/log.h"
#include "daemon/base/state.h"
#include "daemon/core/ledger.h"
#include "daemon/core/presence.h"
#include "daemon/model/apply.h"
#include "daemon/model/common.h"
#include "daemon/model/create.h"
#include "daemon/model/model.h"
#include "daemon/model/model_unit.h"
#include "daemon/model/moved.h"
#include "daemon/model/put.h"
#include "daemon/model/snapshots.h"
#include "daemon/model/spill.h"
#include "kernels/kern.h"
#include "proto/base/failpoint.h"
#include "proto/share/board.h"
#include "proto/share/shardmap.h"
#include "proto/spec/spec_json.h"

_Static_assert(ADOPT_NAME_BYTES == LEDGER_NAME_BYTES, "a refused model's name fits");

#define CAST_ELEMS (UINT64_C(1) << 28) /* between two lines of progress */
#define RETRY_US   1000u

#define SHORTAGE_US    100000u
#define SHORTAGE_LOOKS 100u /* until the daemon serves without who finds no memory */

static int find_part(const struct keeper_group *g, enum keeper_part part, enum segment_kind kind,
                     struct shd_err *e)
{
    return g->fd[part] >= 0 ? SHD_OK
                            : err_set(e, SHD_ESEGMENT, "the keeper has no %s segment of it",
                                      segment_kind_name(kind));
}

static int file_bytes(int fd, enum segment_kind kind, uint64_t *ret_bytes, struct shd_err *e)
{
    struct stat st;
    if (fstat(fd, &st) != 0)
        return err_sys(e, SHD_ESEGMENT, "look at the %s segment", segment_kind_name(kind));
    *ret_bytes = st.st_size > 0 ? (uint64_t)st.st_size : 0;
    return SHD_OK;
}

/* A predecessor's ledger: checked and mapped, its descriptor still the group's. */
static int map_ledger(const struct keeper_group *g, struct segment *ret_segment, struct shd_err *e)
{
    const int fd = g->fd[KEEPER_LEDGER];
    uint64_t bytes = 0;
    int r = find_part(g, KEEPER_LEDGER, SEGMENT_LEDGER, e);
    if (r == SHD_OK)
        r = file_bytes(fd, SEGMENT_LEDGER, &bytes, e);
    if (r == SHD_OK)
        r = segment_check(fd, SEGMENT_LEDGER, bytes, e);
    return r == SHD_OK ? segment_map(fd, SEGMENT_LEDGER, bytes, ret_segment, e) : r;
}

/* Unmap it; the descriptor stays with the group. */
static void unmap_host(struct segment *segment)
{
    segment->fd = -1;
    segment_close(segment);
}

/* A predecessor's segment of the device's memory (kern NULL: of the host's), of so many bytes: the
 * same. A host's is as large as its file, another device's descriptor does not tell: it checks when
 * it imports. */
static int map_part(struct kern *kern, const struct keeper_group *g, enum keeper_part part,
                    enum segment_kind kind, uint64_t bytes, struct segment *ret_segment,
                    struct shd_err *e)
{
    uint64_t found = bytes;
    int r = find_part(g, part, kind, e);
    if (r == SHD_OK && (kern == NULL || kern->ops->place == SEGMENT_HOST))
        r = file_bytes(g->fd[part], kind, &found, e);
    if (r == SHD_OK && found != bytes)
        r = err_set(e, SHD_ESEGMENT, "%s segment has %" PRIu64 " bytes, its ledger says %" PRIu64,
                    segment_kind_name(kind), found, bytes);
    if (r == SHD_OK && kern != NULL && kern->ops->place != SEGMENT_HOST)
        return kern->ops->segment_map(kern, g->fd[part], kind, bytes, /* at= */ NULL, ret_segment,
                                      e);
    return r == SHD_OK ? keeper_segment_map(g->fd[part], kind, bytes, ret_segment, e) : r;
}

static void unmap_state(struct daemon *d, struct segment *segment)
{
    segment->fd = -1;
    if (segment->file)
        keeper_segment_close(d->keeper, segment);
    else
        d->kern->ops->segment_close(d->kern, segment);
}

/* The model that a ledger describes, without its segments. */
static int plan_model(const struct daemon *d, const struct ledger *l, struct model **ret_model,
                      struct shd_err *e)
{
    const struct ledger_head *h = l->head;
    const struct ledger_maker maker = ledger_maker(h);
    const struct model_home home = {
        .kern = d->kern,
        .keeper = d->keeper,
        .owner = h->owner,
        .owners = h->owners,
        .quota = d->quota,
        .maker = { maker.known, maker.uid, maker.gid },
    };
    struct spec *spec = NULL;
    int r = spec_parse(l->spec, h->spec_bytes, &spec, e);
    if (r == SHD_OK)
        r = model_plan(spec, &home, ret_model, e);
    if (r != SHD_OK) {
        spec_free(spec);
        return r;
    }
    const struct model *m = *ret_model;
    if (strcmp(spec->name, h->name) == 0 && spec->unit_count == h->units &&
        spec_returns(spec) == h->micros && m->trail.chunk_count == h->chunk_count &&
        model_state_bytes(m) == h->state_bytes)
        return SHD_OK;
    r = err_set(e, SHD_ESEGMENT,
                "ledger of '%s' has %" PRIu32 " units, %" PRIu32 " gradients, %" PRIu64
                " chunks, %" PRIu64 " bytes of state; its spec of '%s' makes %" PRIu32 ", %" PRIu32
                ", %" PRIu64 ", %" PRIu64,
                h->name, h->units, h->micros, h->chunk_count, h->state_bytes, spec->name,
                spec->unit_count, spec_returns(spec), m->trail.chunk_count, model_state_bytes(m));
    model_free(*ret_model);
    return r;
}

/* Gradients that the ledger says are spilled need a spill segment. */
static bool needs_spill(const struct ledger *l)
{
    uint64_t step;
    if (ledger_rewinding(l, &step))
        return false; /* they are given up */
    for (uint64_t i = 0; i < (uint64_t)l->head->units * l->head->micros; i++) {
        const uint64_t word = atomic_load_explicit(&l->cell[i], memory_order_relaxed);
        if (ledger_cell_round(word) == ledger_round(l) &&
            ledger_cell_kind(word) == LEDGER_CELL_SPILLED)
            return true;
    }
    return false;
}

static int map_state(struct model *m, const struct keeper_group *g, struct shd_err *e)
{
    int r = map_part(m->kern, g, KEEPER_STATE, SEGMENT_STATE, m->ledger->head->state_bytes,
                     &m->state, e);
    if (r == SHD_OK)
        r = common_adopt(m, g, e);
    if (r != SHD_OK)
        return r;
    if (m->kern->ops->place == SEGMENT_HOST && !m->state.file)
        segment_look_huge(&m->state);
    model_find_trail(m);
    if (g->fd[KEEPER_SPILL] >= 0)
        return map_part(/* kern= */ NULL, g, KEEPER_SPILL, SEGMENT_SPILL,
                        layout_align(model_spill_bytes(m), SHD_PAGE_BYTES), &m->spill->segment, e);
    if (needs_spill(m->ledger))
        return err_set(e, SHD_ESEGMENT,
                       "the keeper has no spill segment of it, and there are gradients in that");
    return SHD_OK;
}

/* -- The published copy -------------------------------------------------------------------------
 */

static int cast_elems(struct model *m, struct kern *kern, uint64_t first, uint64_t elems,
                      struct shd_err *e)
{
    for (uint64_t at = 0; at < elems; at += CAST_ELEMS) {
        struct kern_waiter w;
        const uint64_t count = elems - at < CAST_ELEMS ? elems - at : CAST_ELEMS;
        const struct kern_op op = model_publish(m, first + at, count);
        kern_waiter_init(&w);
        int r;
        while ((r = kern->ops->submit(kern, &op, &w.done, e)) == SHD_EBUSY)
            usleep(RETRY_US); /* another adopted model goes on already */
        if (r == SHD_OK && (r = kern_wait(&w)) != SHD_OK)
            kern_explain(kern, r, e, "publishing the parameters");
        if (r != SHD_OK)
            return r;
        keeper_progress("Adopting model %s: %" PRIu64 " of %" PRIu64 " parameters published",
                        m->spec->name, first + at + count, m->map->elems);
    }
    return SHD_OK;
}

static bool unit_is_current(const struct model *m, uint32_t unit)
{
    return atomic_load(&m->ledger->unit[unit].version) == atomic_load(&m->ledger->head->commits);
}

/* Units with all committed updates now, neighbours together; the others when they are applied. */
static int publish_model(struct model *m, struct kern *kern, struct shd_err *e)
{
    const uint64_t commits = atomic_load(&m->ledger->head->commits);
    const uint32_t units = m->spec->unit_count;
    for (uint32_t u = 0; u < units;) {
        uint32_t end = u;
        while (end < units && unit_is_current(m, end))
            end++;
        if (end > u) {
            const uint64_t first = m->map->base_elem[u];
            const uint64_t stop = end < units ? m->map->base_elem[end] : m->map->elems;
            const int r = cast_elems(m, kern, first, stop - first, e);
            if (r != SHD_OK)
                return r;
        }
        for (; u < end; u++)
            board_begin(m->board, u, commits);
        for (; u < units && !unit_is_current(m, u); u++)
            m->units[u].publish_whole = true;
    }
    return SHD_OK;
}

/* -- One model ----------------------------------------------------------------------------------
 */

static int restore_order(struct model *m, struct kern *kern, struct shd_err *e)
{
    keeper_progress("Adopting model %s: repairing", m->spec->name);
    FAIL_POINT("adopt:repair:before");
    int r = kern->ops->trail_repair(kern, m->trail.area, m->state.base,
                                    shardmap_state_bytes(m->map), m->trail.chunks,
                                    m->trail.chunk_count, e);
    FAIL_POINT("adopt:repair:after");
    if (r == SHD_OK)
        r = snapshots_finish_rewind(m, kern, e);
    if (r == SHD_OK)
        r = model_core(m, e);
    keeper_progress("Adopting model %s: publishing", m->spec->name);
    if (r == SHD_OK)
        r = publish_model(m, kern, e);
    FAIL_POINT("adopt:publish:after");
    return r;
}

/* Nothing may fail from here on. */
static void resume_model(struct daemon *d, struct model *m)
{
    struct step_actions actions;
    m->ready = true;
    spill_adopted(m);
    model_register(d, m);
    board_set_step(m->board, step_now(m->core), step_phase(m->core));
    board_set_attempt(m->board, step_collecting(m->core), ledger_resets(m->ledger) + 1);
    snapshots_say(m);
    keeper_segment_behind(d->keeper, &m->state, 0, m->state.bytes);
    keeper_segment_write(d->keeper, &m->publish, 0, m->publish.bytes);
    for (uint32_t u = 0; u < m->spec->unit_count; u++) {
        step_resume(m->core, u, &actions);
        apply_actions(m, &actions); /* completions wait until the loop runs */
    }
    put_step_over(m);
    FAIL_POINT("adopt:resume:after");
}

static int adopt_model(struct daemon *d, struct keeper_group *g, const struct ledger *l,
                       const struct segment *ledger_segment, struct shd_err *e)
{
    struct model *m = NULL;
    int r = SHD_OK;
    if (d->model_count == DAEMON_MODELS_MAX)
        return err_set(e, SHD_EBUSY, "daemon %s has %u models, the most there may be", d->device,
                       DAEMON_MODELS_MAX);
    if (model_find(d, l->head->name) != NULL)
        return err_set(e, SHD_EEXIST, "another instance of it was adopted");
    r = plan_model(d, l, &m, e);
    if (r != SHD_OK)
        return r;
    m->kept.instance = g->instance;
    *m->ledger = *l;
    m->kept.stored = m->kept.adopted = true;
    m->kept.spare_fd = g->fd[KEEPER_SPARE];
    m->kept.next_fd = g->fd[KEEPER_NEXT];
    r = model_share(m, e); /* first: others may have taken the memory */
    if (r == SHD_OK)
        r = map_state(m, g, e);
    if (r == SHD_OK)
        r = put_adopt(m, g, e);
    if (r == SHD_OK)
        r = snapshots_adopt(m, g, e);
    if (r == SHD_OK)
        r = restore_order(m, d->kern, e);
    if (r != SHD_OK) {
        put_unadopt(m);
        snapshots_unadopt(m);
        common_unadopt(m);
        unmap_state(d, &m->state);
        unmap_host(&m->spill->segment);
        m->kept.spare_fd = -1; /* the group's, which keeps it */
        m->kept.next_fd = -1;
        model_free(m);
        return r;
    }
    ledger_renew(m->ledger);
    put_adopted(m, g);
    snapshots_adopted(m, g);
    common_adopted(m, g);
    m->ledger_segment = *ledger_segment;
    model_adopted(m);
    for (int part = 0; part < KEEPER_PARTS; part++)
        g->fd[part] = -1; /* the model's now */
    if (presence_of(m->ledger->head) == PRESENCE_WAITS) {
        create_adopted(d, m);
        return SHD_OK;
    }
    resume_model(d, m);
    log_info("op=adopt model=%s owner=%" PRIu32 "/%" PRIu32 " step=%" PRIu64
             " phase=%s returned=%" PRIu64 " waiting=%" PRIu64,
             m->spec->name, m->map->owner, m->map->owners, step_now(m->core),
             step_phase_name(step_phase(m->core)), step_cells_in(m->core),
             step_cells_waiting(m->core));
    return SHD_OK;
}

/* Its memory, however long the keeper takes to close its own descriptors. What other models have as
 * well is theirs. */
static void give_back(const struct keeper_group *g)
{
    for (int part = 0; part < KEEPER_PARTS; part++) {
        struct stat st;
        if (part != KEEPER_LEDGER && part != KEEPER_COMMON && g->fd[part] >= 0 &&
            fstat(g->fd[part], &st) == 0 &&
            st.st_size > 0 && /* else a device's, which goes with its last descriptor */
            fallocate(g->fd[part], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, st.st_size) != 0)
            log_warn("op=adopt instance=%016" PRIx64 " why=\"give memory back: %s\" do=\"nothing: "
                     "it goes when the keeper closes it\"",
                     g->instance, strerror(errno));
    }
}

static void drop_group(struct daemon *d, struct keeper_group *g)
{
    keeper_remove(d->keeper, g->instance);
    give_back(g);
    keeper_forget(g);
    g->done = true;
}

/* The name in a broken ledger goes to logs and JSON: only printable characters stay. */
static void make_printable(char *text)
{
    for (; *text != '\0'; text++)
        if (*text < ' ' || *text > '~')
            *text = '?';
}

static void refuse(struct daemon *d, const struct keeper_group *g, const char *name,
                   const struct shd_err *why)
{
    struct adopt *a = d->adopt;
    struct adopt_refused refused = { .why = *why };
    snprintf(refused.name, sizeof refused.name, "%s", name);
    make_printable(refused.name);
    make_printable(refused.why.text);
    log_error("op=adopt model=%s instance=%016" PRIx64 " status=%s why=\"%s\""
              " do=\"its bytes are kept: start the version that wrote them, or drain and "
              "`shardctl restore` a checkpoint\"",
              refused.name, g->instance, status_name(why->code), refused.why.text);
    if (a->refused_count < ADOPT_REFUSED_MAX)
        a->refused[a->refused_count++] = refused;
}

/* Checked and mapped: what a group's ledger says. name is set also when that fails. */
static int look_at_ledger(const struct keeper_group *g, struct ledger *l, struct segment *segment,
                          char name[LEDGER_NAME_BYTES], struct shd_err *e)
{
    const struct ledger_head *head;
    snprintf(name, LEDGER_NAME_BYTES, "m%016" PRIx64, g->instance);
    int r = map_ledger(g, segment, e);
    if (r == SHD_OK && ledger_known(segment->base, segment->bytes, &head) && head->name[0] != '\0')
        snprintf(name, LEDGER_NAME_BYTES, "%.*s", (int)sizeof head->name, head->name);
    if (r == SHD_OK)
        r = ledger_adopt(l, segment->base, segment->bytes, e);
    if (r == SHD_OK && l->head->instance != g->instance)
        r = err_set(e, SHD_ESEGMENT,
                    "ledger is of instance %016" PRIx64 ", its name says %016" PRIx64,
                    l->head->instance, g->instance);
    return r;
}

/* A model that was never complete gives its memory back before any other needs some. Nobody has
 * seen it. */
static void drop_incomplete(struct daemon *d, struct keeper_group *g)
{
    struct segment segment = SEGMENT_CLOSED;
    struct ledger ledger;
    struct shd_err e = { 0 };
    char name[LEDGER_NAME_BYTES];
    const int r = look_at_ledger(g, &ledger, &segment, name, &e);
    const bool incomplete = r == SHD_OK && presence_of(ledger.head) == PRESENCE_NONE;
    unmap_host(&segment);
    if (!incomplete)
        return;
    log_warn("op=adopt model=%s instance=%016" PRIx64
             " why=\"dropped: its initial values were not complete, or it was being dropped\""
             " do=\"nothing: whoever opens it makes it again\"",
             name, g->instance);
    drop_group(d, g);
}

/* So does one in whose place another was restored. */
static void drop_replaced(struct daemon *d, const struct keeper_group *by)
{
    struct segment segment = SEGMENT_CLOSED;
    struct ledger ledger;
    struct shd_err e = { 0 };
    char name[LEDGER_NAME_BYTES];
    const int r = look_at_ledger(by, &ledger, &segment, name, &e);
    const uint64_t replaced = r == SHD_OK ? ledger.head->restored.replaces : 0;
    unmap_host(&segment);
    for (uint32_t i = 0; replaced != 0 && i < d->keeper->group_count; i++) {
        struct keeper_group *g = &d->keeper->groups[i];
        if (g->done || g == by || g->instance != replaced)
            continue;
        log_info("op=adopt model=%s instance=%016" PRIx64 " why=\"replaced by a restore\"", name,
                 g->instance);
        drop_group(d, g);
    }
}

/* looks: how often memory was looked for. patient: it may be looked for again. */
static void adopt_group(struct daemon *d, struct keeper_group *g, uint32_t looks, bool patient)
{
    struct segment segment = SEGMENT_CLOSED;
    struct ledger ledger;
    struct shd_err e = { 0 };
    char name[LEDGER_NAME_BYTES];
    int r = look_at_ledger(g, &ledger, &segment, name, &e);
    if (looks == 0)
        keeper_progress("Adopting model %s: mapping what is kept", name);
    if (r == SHD_OK)
        r = adopt_model(d, g, &ledger, &segment, &e);
    g->done = r != SHD_ENOMEM || !patient;
    if (r == SHD_OK) {
        d->adopt->models++;
        return;
    }
    if (g->done)
        refuse(d, g, name, &e);
    unmap_host(&segment);
    if (g->done || looks % SHORTAGE_LOOKS != 0)
        return;
    log_warn("op=adopt model=%s status=%s why=\"%s\" do=\"free memory or raise the limit: what is "
             "kept of it waits\"",
             name, status_name(r), e.text);
    keeper_progress("Adopting model %s: waiting for memory: %s", name, e.text);
}

/* True: some find no memory. */
static bool adopt_some(struct daemon *d, uint32_t looks, bool patient)
{
    bool waits = false;
    for (uint32_t i = 0; i < d->keeper->group_count; i++) {
        struct keeper_group *g = &d->keeper->groups[i];
        if (!g->done)
            adopt_group(d, g, looks, patient);
        waits = waits || !g->done;
    }
    return waits;
}

/* Memory that others have taken is waited for, for what was kept is safe: a while when there are
 * models to serve, else as long as it takes, for a process that ends would not be back sooner. */
void adopt_all(struct daemon *d)
{
    const uint64_t start_ns = uv_hrtime();
    struct timespec now;
    if (d->keeper->group_count == 0)
        return;
    for (uint32_t i = 0; i < d->keeper->group_count; i++)
        drop_incomplete(d, &d->keeper->groups[i]);
    for (uint32_t i = 0; i < d->keeper->group_count; i++)
        if (!d->keeper->groups[i].done)
            drop_replaced(d, &d->keeper->groups[i]);
    moved_adopt(d);
    for (uint32_t looks = 0;; looks++) {
        const bool patient = d->adopt->models == 0 || looks < SHORTAGE_LOOKS;
        if (!adopt_some(d, looks, patient))
            break;
        usleep(SHORTAGE_US);
    }
    clock_gettime(CLOCK_REALTIME, &now);
    d->adopt->at_s = (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
    d->adopt->ms = (double)(uv_hrtime() - start_ns) * 1e-6;
    log_info("op=adopt models=%" PRIu32 " refused=%" PRIu32 " ms=%.1f", d->adopt->models,
             d->adopt->refused_count, d->adopt->ms);
}

int adopt_check_name(const struct daemon *d, const char *name, struct shd_err *e)
{
    for (uint32_t i = 0; i < d->adopt->refused_count; i++) {
        const struct adopt_refused *refused = &d->adopt->refused[i];
        if (strcmp(refused->name, name) == 0)
            return err_set(e, refused->why.code,
                           "model '%s' of a predecessor is kept, and cannot "
                           "be used: %s",
                           name, refused->why.text);
    }
    return SHD_OK;
}
