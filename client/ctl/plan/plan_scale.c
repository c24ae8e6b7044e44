/* See plan_scale.h. */
#include "client/ctl/plan/plan_scale.h"

#include <inttypes.h>
#include <stdlib.h>

#include "client/ctl/base/text.h"
#include "client/ctl/plan/plan_copies.h"
#include "client/plan/plan_cost.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/share/cluster.h"
#include "proto/share/shardmap.h"
#include "proto/spec/layout.h"

/* Between a step's last gradient and the next one's first parameters these cross one after the
 * other: the gradient, its credit, Prepare, its reply, Commit, the slice. */
#define TRIPS 6u

/* Of one host's owners. */
struct part {
    uint64_t published, slices;        /* bytes of all units once, and in how many pieces */
    uint64_t fetched, fetches;         /* the same, as often as the plan has a unit fetched */
    uint64_t returned, returned_parts; /* of one group of micro-batches; in how many messages */
    uint64_t inbox;                    /* of one worker */
};

struct flow {
    uint64_t in_bytes, out_bytes, in_messages, out_messages;
};

struct scale {
    struct flow relays, direct; /* the busiest host's, each number by itself */
    uint64_t mirror_bytes, inbox_bytes;
    uint64_t connections; /* of a relay */
    double compute_s;     /* < 0: not given */
};

int plan_scale_parse(struct plan_ask *ask, struct shd_err *e)
{
    const struct plan_scale_ask *s = &ask->scale;
    const uint64_t all = (uint64_t)s->hosts * s->gpus;
    if (s->hosts == 0 && s->gpus == 0) {
        if (s->gbit > 0 || s->latency_us > 0)
            return err_set(e, SHD_EINVAL, "%s is of a network: it needs --hosts and --gpus",
                           s->gbit > 0 ? "--bandwidth" : "--latency");
        return SHD_OK;
    }
    if (s->hosts == 0 || s->gpus == 0)
        return err_set(e, SHD_EINVAL, "%s without %s: both say how many workers there are",
                       s->hosts == 0 ? "--gpus" : "--hosts", s->hosts == 0 ? "--hosts" : "--gpus");
    if (ask->hosts.count > 0)
        return err_set(e, SHD_EINVAL,
                       "--hosts %" PRIu32 " with --host: hosts that are alike, or "
                       "each by its name",
                       s->hosts);
    if (s->latency_us > 0 && s->gbit == 0)
        return err_set(e, SHD_EINVAL, "--latency %g without --bandwidth", s->latency_us);
    if (all > SHD_OWNERS_MAX)
        return err_set(e, SHD_EINVAL,
                       "--hosts %" PRIu32 " --gpus %" PRIu32 ": %" PRIu64 " daemons, at most %u",
                       s->hosts, s->gpus, all, SHD_OWNERS_MAX);
    if (all % ask->replicas != 0)
        return err_set(e, SHD_EINVAL,
                       "--replicas 2: %" PRIu64 " daemons make no pairs, they have to be even",
                       all);
    if (ask->daemons != 0 && ask->daemons != all)
        return err_set(e, SHD_EINVAL,
                       "--hosts and --gpus: %" PRIu64 " daemons, --daemons says %" PRIu32, all,
                       ask->daemons);
    if (ask->workers != 1 && ask->workers != all)
        return err_set(e, SHD_EINVAL,
                       "--hosts and --gpus: %" PRIu64 " workers, --workers says %" PRIu32, all,
                       ask->workers);
    ask->workers = (uint32_t)all;
    ask->daemons = (uint32_t)all / ask->replicas;
    return SHD_OK;
}

/* Each worker here has one to each daemon elsewhere, those there likewise; and so has each mirror
 * of such a daemon, here and there. */
static uint64_t connections_of(const struct plan_scale_ask *s)
{
    return 2 * (uint64_t)s->gpus * (s->gpus + 1) * (s->hosts - 1);
}

/* -- Counting ---------------------------------------------------------------------------------- */

static void add_owner(const struct spec *spec, const struct plan_ask *ask,
                      const struct shardmap *map, const uint32_t *fetches, bool primary,
                      struct part *p)
{
    const enum shd_dtype asked = ask->policy.grad_dtype;
    for (uint32_t u = 0; u < map->units; u++) {
        const struct spec_unit *unit = &spec->units[u];
        const enum shd_dtype as = unit->mean || asked == 0 ? SHD_F32 : asked;
        const uint64_t bytes = shardmap_publish_sent_bytes(map, u);
        p->published += bytes;
        p->slices += bytes > 0;
        p->fetched += primary ? fetches[u] * bytes : 0;
        p->fetches += primary && bytes > 0 ? fetches[u] : 0;
        if (!unit->frozen) { /* an owner that has no part of it is told all the same */
            p->returned += shardmap_grad_bytes(map, u, as);
            p->returned_parts++;
        }
    }
}

static int count_copy(const struct spec *spec, const struct plan_ask *ask,
                      const struct plan_copy *copy, uint32_t slots, const uint32_t *fetches,
                      struct part *p, struct shd_err *e)
{
    struct shardmap *map;
    const int r = shardmap_new(spec, copy->slice, ask->daemons, &map, e);
    if (r != SHD_OK)
        return r;
    add_owner(spec, ask, map, fetches, copy->primary, p);
    p->inbox += shardmap_inbox_bytes(map, slots);
    shardmap_free(map);
    return SHD_OK;
}

/* Of hosts h0, h1, ... */
static int copies_of(const struct plan_ask *ask, struct plan_copies *ret_copies, struct shd_err *e)
{
    struct plan_host *hosts = sys_calloc(ask->scale.hosts, sizeof *hosts);
    if (hosts == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " hosts", ask->scale.hosts);
    for (uint32_t i = 0; i < ask->scale.hosts; i++) {
        snprintf(hosts[i].name, sizeof hosts[i].name, "h%" PRIu32, i);
        hosts[i].daemons = ask->scale.gpus;
    }
    const int r = plan_copies_new(hosts, ask->scale.hosts, ask->replicas, ret_copies, e);
    free(hosts);
    return r;
}

static void sum_part(struct part *all, const struct part *p)
{
    all->published += p->published;
    all->slices += p->slices;
    all->fetched += p->fetched;
    all->fetches += p->fetches;
    all->returned += p->returned;
    all->returned_parts += p->returned_parts;
    all->inbox += p->inbox;
}

static void keep_most(struct flow *most, const struct flow *f)
{
    most->in_bytes = f->in_bytes > most->in_bytes ? f->in_bytes : most->in_bytes;
    most->out_bytes = f->out_bytes > most->out_bytes ? f->out_bytes : most->out_bytes;
    most->in_messages = f->in_messages > most->in_messages ? f->in_messages : most->in_messages;
    most->out_messages = f->out_messages > most->out_messages ? f->out_messages
                                                              : most->out_messages;
}

/* One host, whose owners have `own` of `all`. Its workers return `groups` times to every owner, by
 * Return; Prepare and Commit go from each worker to each owner. */
static void add_host(const struct plan_ask *ask, const struct part *own, const struct part *all,
                     uint64_t groups, struct scale *s)
{
    const uint64_t gpus = ask->scale.gpus, others = ask->scale.hosts - 1;
    const uint64_t decided = 2 * gpus * gpus * others;
    const struct flow gradients = {
        .in_bytes = own->returned * groups * others,
        .out_bytes = (all->returned - own->returned) * groups,
        .in_messages = own->returned_parts * groups * others + decided,
        .out_messages = (all->returned_parts - own->returned_parts) * groups + decided,
    };
    const struct flow relays = {
        .in_bytes = gradients.in_bytes + all->published - own->published,
        .out_bytes = gradients.out_bytes + own->published * others,
        .in_messages = gradients.in_messages + all->slices - own->slices,
        .out_messages = gradients.out_messages + own->slices * others,
    };
    const struct flow direct = {
        .in_bytes = gradients.in_bytes + gpus * (all->fetched - own->fetched),
        .out_bytes = gradients.out_bytes + gpus * own->fetched * others,
        .in_messages = gradients.in_messages + gpus * (all->fetches - own->fetches),
        .out_messages = gradients.out_messages + gpus * own->fetches * others,
    };
    const uint64_t mirror = all->published - own->published;
    const uint64_t inbox = gpus * (all->inbox - own->inbox);
    keep_most(&s->relays, &relays);
    keep_most(&s->direct, &direct);
    s->mirror_bytes = mirror > s->mirror_bytes ? mirror : s->mirror_bytes;
    s->inbox_bytes = inbox > s->inbox_bytes ? inbox : s->inbox_bytes;
}

static int count_scale(const struct spec *spec, const struct plan_ask *ask, const struct plan *plan,
                       struct scale *ret_scale, struct shd_err *e)
{
    const uint32_t hosts = ask->scale.hosts;
    const uint32_t slots = plan_slots(spec, &ask->policy, plan);
    const uint32_t a = spec->accumulate > 0 ? spec->accumulate : 1;
    const uint64_t micros = (uint64_t)plan->micros * ask->scale.gpus, groups = micros / a;
    if (micros % a != 0)
        return err_set(e, SHD_EINVAL,
                       "%" PRIu64 " micro-batches a host, must be a multiple of accumulate "
                       "(%" PRIu32 "), of which its workers make a sum",
                       micros, a);
    struct scale s = { .compute_s = ask->compute_s > 0 ? ask->compute_s * plan->micros : -1,
                       .connections = connections_of(&ask->scale) };
    struct part all = { 0 };
    struct part *parts = sys_calloc(hosts, sizeof *parts);
    uint32_t *fetches = sys_calloc(spec->unit_count, sizeof *fetches);
    struct plan_copies copies = { 0 };
    int r = SHD_OK;
    if (parts == NULL || fetches == NULL) {
        r = err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " hosts", hosts);
        goto out;
    }
    for (uint32_t i = 0; i < plan->op_count; i++)
        if (plan->ops[i].kind == PLAN_FETCH) /* others may be of no unit */
            fetches[plan->ops[i].unit]++;
    r = copies_of(ask, &copies, e);
    for (uint32_t i = 0; r == SHD_OK && i < copies.count; i++)
        r = count_copy(spec, ask, &copies.items[i], slots, fetches, &parts[copies.items[i].host],
                       e);
    for (uint32_t host = 0; host < hosts; host++)
        sum_part(&all, &parts[host]);
    for (uint32_t host = 0; r == SHD_OK && host < hosts; host++)
        add_host(ask, &parts[host], &all, groups, &s);
    if (r == SHD_OK)
        *ret_scale = s;
out:
    plan_copies_free(&copies);
    free(fetches);
    free(parts);
    return r;
}

/* The link carries both directions at once; messages follow each other without waiting. */
static double wire_s(const struct plan_ask *ask, const struct flow *f)
{
    const uint64_t most = f->in_bytes > f->out_bytes ? f->in_bytes : f->out_bytes;
    return (double)most * 8 / (ask->scale.gbit * 1e9) + TRIPS * ask->scale.latency_us * 1e-6;
}

static double hidden_s(double compute, double wire)
{
    return compute > wire ? compute : wire;
}

/* -- Showing ----------------------------------------------------------------------------------- */

static void print_flow(struct table *t, const char *name, const struct flow *f)
{
    char in[TEXT_BYTES], out[TEXT_BYTES], in_messages[TEXT_BYTES], out_messages[TEXT_BYTES];
    snprintf(in_messages, sizeof in_messages, "%" PRIu64, f->in_messages);
    snprintf(out_messages, sizeof out_messages, "%" PRIu64, f->out_messages);
    table_row(t, (const char *[]){ name, text_size(f->in_bytes, in), text_size(f->out_bytes, out),
                                   in_messages, out_messages });
}

static void print_seconds(const struct plan_ask *ask, const char *name, const struct flow *f,
                          double compute, FILE *out)
{
    const double wire = wire_s(ask, f);
    fprintf(out, "  %s: %.3g s of network", name, wire);
    if (compute >= 0)
        fprintf(out, " beside %.3g s of compute: a step of %.3g s hidden, %.3g s not", compute,
                hidden_s(compute, wire), compute + wire);
    fprintf(out, ".\n");
}

int plan_scale_print(const struct spec *spec, const struct plan_ask *ask, const struct plan *plan,
                     FILE *out, struct shd_err *e)
{
    static const char *const headings[] = { "A HOST AND STEP", "BYTES IN", "BYTES OUT",
                                            "MESSAGES IN", "MESSAGES OUT" };
    char mirror[TEXT_BYTES], inbox[TEXT_BYTES];
    struct scale s = { .compute_s = -1 };
    struct table t;
    if (ask->scale.hosts == 0)
        return SHD_OK;
    const int r = count_scale(spec, ask, plan, &s, e);
    if (r != SHD_OK)
        return r;
    fprintf(out, "\n  %" PRIu32 " hosts with %" PRIu32 " daemons and workers each%s\n",
            ask->scale.hosts, ask->scale.gpus, ask->replicas > 1 ? ", each slice on two" : "");
    table_init(&t, headings, ARRAY_SIZE(headings));
    print_flow(&t, "with relays", &s.relays);
    print_flow(&t, "all to all", &s.direct);
    table_print(&t, "  ", out);
    table_deinit(&t);
    fprintf(out,
            "  A relay holds %s of mirrors (twice that for a while after a lost connection) and %s "
            "of inboxes, and %" PRIu64 " connections.\n",
            text_size(s.mirror_bytes, mirror), text_size(s.inbox_bytes, inbox), s.connections);
    if (s.connections > CLUSTER_RELAY_CONNECTIONS_MAX)
        fprintf(out,
                "  Relays of this build take at most %u connections: these hosts do not run so. "
                "With a daemon and a\n  worker each %" PRIu64 " would have.\n",
                CLUSTER_RELAY_CONNECTIONS_MAX,
                connections_of(&(struct plan_scale_ask){ .hosts = ask->scale.hosts, .gpus = 1 }));
    if (ask->scale.gbit > 0) {
        print_seconds(ask, "With relays", &s.relays, s.compute_s, out);
        print_seconds(ask, "All to all", &s.direct, s.compute_s, out);
    }
    return SHD_OK;
}

static json_t *json_flow(const struct plan_ask *ask, const struct flow *f, double compute)
{
    json_t *o = json_pack("{s:I, s:I, s:I, s:I}", "bytes_in", (json_int_t)f->in_bytes, "bytes_out",
                          (json_int_t)f->out_bytes, "messages_in", (json_int_t)f->in_messages,
                          "messages_out", (json_int_t)f->out_messages);
    if (ask->scale.gbit > 0) {
        const double wire = wire_s(ask, f);
        json_object_set_new(o, "network_s", json_real(wire));
        if (compute >= 0) {
            json_object_set_new(o, "step_hidden_s", json_real(hidden_s(compute, wire)));
            json_object_set_new(o, "step_s", json_real(compute + wire));
        }
    }
    return o;
}

int plan_scale_json(const struct spec *spec, const struct plan_ask *ask, const struct plan *plan,
                    json_t **ret_json, struct shd_err *e)
{
    struct scale s = { .compute_s = -1 };
    *ret_json = NULL;
    if (ask->scale.hosts == 0)
        return SHD_OK;
    const int r = count_scale(spec, ask, plan, &s, e);
    if (r == SHD_OK)
        *ret_json = json_pack("{s:I, s:I, s:o, s:o, s:I, s:I, s:I, s:I}", "hosts",
                              (json_int_t)ask->scale.hosts, "gpus", (json_int_t)ask->scale.gpus,
                              "relays", json_flow(ask, &s.relays, s.compute_s), "all_to_all",
                              json_flow(ask, &s.direct, s.compute_s), "mirror_bytes",
                              (json_int_t)s.mirror_bytes, "inbox_bytes", (json_int_t)s.inbox_bytes,
                              "relay_connections", (json_int_t)s.connections,
                              "relay_connections_max", (json_int_t)CLUSTER_RELAY_CONNECTIONS_MAX);
    return r;
}
