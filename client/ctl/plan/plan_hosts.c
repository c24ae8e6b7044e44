/* See plan_hosts.h. */
#include "client/ctl/plan/plan_hosts.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "client/ctl/base/text.h"
#include "client/plan/plan_cost.h"
#include "proto/base/check.h"
#include "proto/share/shardmap.h"
#include "proto/spec/layout.h"
#include "proto/spec/spec.h"

/* -- Words ------------------------------------------------------------------------------------- */

static bool parse_number(const char **at, uint32_t max, uint32_t *ret_number)
{
    char *end;
    if (**at != ':' || (*at)[1] < '0' || (*at)[1] > '9')
        return false;
    const unsigned long n = strtoul(*at + 1, &end, 10);
    *at = end;
    *ret_number = (uint32_t)n;
    return n <= max;
}

static int parse_host(const char *word, struct plan_hosts *hosts, struct shd_err *e)
{
    struct plan_host *host = &hosts->items[hosts->count];
    const size_t bytes = strcspn(word, ":");
    const char *at = word + bytes;
    if (bytes == 0 || bytes >= sizeof host->name ||
        !parse_number(&at, SHD_OWNERS_MAX, &host->daemons) ||
        !parse_number(&at, SHD_MICROS_MAX, &host->workers) || *at != '\0')
        return err_set(e, SHD_EINVAL,
                       "--host '%.80s' is not NAME:DAEMONS:WORKERS, as a:2:1, at most %u and %u",
                       word, SHD_OWNERS_MAX, SHD_MICROS_MAX);
    memcpy(host->name, word, bytes);
    host->name[bytes] = '\0';
    for (uint32_t i = 0; i < hosts->count; i++)
        if (strcmp(hosts->items[i].name, host->name) == 0)
            return err_set(e, SHD_EINVAL, "--host '%.80s': there is a host '%s' already", word,
                           host->name);
    hosts->count++;
    return SHD_OK;
}

static int check_sum(const char *flag, uint64_t sum, uint32_t given, uint32_t max,
                     struct shd_err *e)
{
    if (sum == 0)
        return err_set(e, SHD_EINVAL, "--host: no host has any %s", flag);
    if (sum > max)
        return err_set(e, SHD_EINVAL, "--host: %" PRIu64 " %s, at most %" PRIu32, sum, flag, max);
    if (given != 0 && given != sum)
        return err_set(e, SHD_EINVAL, "--host: %" PRIu64 " %s, --%s says %" PRIu32, sum, flag, flag,
                       given);
    return SHD_OK;
}

int plan_hosts_parse(struct plan_ask *ask, struct plan_hosts *ret_hosts, struct shd_err *e)
{
    struct plan_hosts *hosts = ret_hosts;
    uint64_t daemons = 0, workers = 0;
    int r = SHD_OK;
    hosts->count = 0;
    for (uint32_t i = 0; r == SHD_OK && i < ask->hosts.count; i++)
        r = parse_host(ask->hosts.items[i], hosts, e);
    for (uint32_t i = 0; i < hosts->count; i++) {
        daemons += hosts->items[i].daemons;
        workers += hosts->items[i].workers;
    }
    if (r != SHD_OK)
        return r;
    if (hosts->count == 0)
        return ask->replicas == 1 || ask->scale.hosts > 0
                   ? SHD_OK
                   : err_set(e, SHD_EINVAL,
                             "--replicas %" PRIu32
                             " is of several hosts: it needs --host, of each, or --hosts",
                             ask->replicas);
    r = check_sum("daemons", daemons, ask->daemons, SHD_OWNERS_MAX, e);
    if (r == SHD_OK)
        r = check_sum("workers", workers, ask->workers == 1 ? 0 : ask->workers, SHD_MICROS_MAX, e);
    if (r == SHD_OK)
        r = plan_copies_new(hosts->items, hosts->count, ask->replicas, &hosts->copies, e);
    ask->daemons = (uint32_t)daemons / ask->replicas;
    ask->workers = (uint32_t)workers;
    return r;
}

void plan_hosts_free(struct plan_hosts *hosts)
{
    plan_copies_free(&hosts->copies);
    hosts->count = 0;
}

/* -- Counting ---------------------------------------------------------------------------------- */

static uint32_t first_rank(const struct plan_hosts *hosts, uint32_t host)
{
    uint32_t first = 0;
    for (uint32_t i = 0; i < host; i++)
        first += hosts->items[i].workers;
    return first;
}

/* Of workers that sum together, which take groups in turn, host by host. */
static uint64_t host_groups(const struct plan_hosts *hosts, uint32_t host, uint32_t groups)
{
    uint32_t teams = 0, place = 0;
    for (uint32_t i = 0; i < hosts->count; i++) {
        place += i < host && hosts->items[i].workers > 0;
        teams += hosts->items[i].workers > 0;
    }
    if (hosts->items[host].workers == 0)
        return 0;
    return groups / teams + (place < groups % teams);
}

/* Of the groups of a step, those that the workers on this host compute: rank r has r, r + W, ... */
static uint64_t groups_of(const struct spec *spec, const struct plan_ask *ask,
                          const struct plan_hosts *hosts, uint32_t host)
{
    const uint32_t first = first_rank(hosts, host);
    const uint32_t groups = spec->micro_batches / (spec->accumulate > 0 ? spec->accumulate : 1);
    uint64_t sum = 0;
    if (ask->policy.shares_sums)
        return host_groups(hosts, host, groups);
    for (uint32_t rank = first; rank < first + hosts->items[host].workers; rank++)
        sum += groups / ask->workers + (rank < groups % ask->workers);
    return sum;
}

/* What an owner publishes in a step, and what one group returns to it. */
static void add_owner(const struct spec *spec, const struct plan_ask *ask,
                      const struct shardmap *map, uint64_t *published, uint64_t *returned)
{
    const enum shd_dtype dtype = ask->policy.grad_dtype != 0 ? ask->policy.grad_dtype
                                                             : spec->grad_dtype;
    for (uint32_t u = 0; u < map->units; u++) {
        const struct spec_unit *unit = &spec->units[u];
        const enum shd_dtype as = unit->mean ? SHD_F32 : dtype != 0 ? dtype : SHD_F32;
        *published += shardmap_publish_sent_bytes(map, u);
        *returned += unit->frozen ? 0 : shardmap_grad_bytes(map, u, as);
    }
}

static int add_owners(const struct spec *spec, const struct plan_ask *ask,
                      const struct plan_hosts *hosts, uint32_t host, uint64_t *published,
                      uint64_t *returned, struct shd_err *e)
{
    const struct plan_copies *c = &hosts->copies;
    for (uint32_t i = 0; i < c->count; i++) {
        struct shardmap *map;
        if (c->items[i].host != host)
            continue;
        const int r = shardmap_new(spec, c->items[i].slice, ask->daemons, &map, e);
        if (r != SHD_OK)
            return r;
        add_owner(spec, ask, map, published, returned);
        shardmap_free(map);
    }
    return SHD_OK;
}

int plan_crossing(const struct spec *spec, const struct plan_ask *ask,
                  const struct plan_hosts *hosts, uint32_t from, uint32_t to,
                  struct plan_crossing *ret_crossing, struct shd_err *e)
{
    uint64_t published = 0, returned = 0, ignored = 0;
    CHECK(from != to && from < hosts->count && to < hosts->count);
    int r = add_owners(spec, ask, hosts, from, &published, &ignored, e);
    if (r == SHD_OK)
        r = add_owners(spec, ask, hosts, to, &ignored, &returned, e);
    if (r != SHD_OK)
        return r;
    *ret_crossing = (struct plan_crossing){
        .parameters_bytes = hosts->items[to].workers > 0 ? published : 0,
        .gradients_bytes = returned * groups_of(spec, ask, hosts, from),
    };
    return SHD_OK;
}

/* -- Showing ----------------------------------------------------------------------------------- */

static int print_row(const struct spec *spec, const struct plan_ask *ask,
                     const struct plan_hosts *hosts, uint32_t from, uint32_t to, struct table *t,
                     struct shd_err *e)
{
    struct plan_crossing c;
    char parameters[TEXT_BYTES], gradients[TEXT_BYTES];
    const int r = plan_crossing(spec, ask, hosts, from, to, &c, e);
    if (r == SHD_OK && c.parameters_bytes + c.gradients_bytes > 0)
        table_row(t, (const char *[]){ hosts->items[from].name, hosts->items[to].name,
                                       text_size(c.parameters_bytes, parameters),
                                       text_size(c.gradients_bytes, gradients) });
    return r;
}

int plan_hosts_print(const struct spec *spec, const struct plan_ask *ask,
                     const struct plan_hosts *hosts, FILE *out, struct shd_err *e)
{
    static const char *const headings[] = { "CROSSES A STEP, FROM", "TO", "PARAMETERS",
                                            "GRADIENTS" };
    struct table t;
    int r = SHD_OK;
    if (hosts->count == 0)
        return r;
    table_init(&t, headings, ARRAY_SIZE(headings));
    for (uint32_t from = 0; from < hosts->count; from++)
        for (uint32_t to = 0; r == SHD_OK && to < hosts->count; to++)
            if (from != to)
                r = print_row(spec, ask, hosts, from, to, &t, e);
    fputc('\n', out);
    table_print(&t, "  ", out);
    table_deinit(&t);
    if (r == SHD_OK)
        fprintf(out,
                "  Parameters cross once for each host, whatever the strategy; each group of %s "
                "gradients by itself%s.\n",
                ask->policy.shares_sums ? "a host's" : "each worker's",
                ask->replicas > 1 ? ",\n  to both copies of each slice" : "");
    return r;
}

int plan_hosts_json(const struct spec *spec, const struct plan_ask *ask,
                    const struct plan_hosts *hosts, json_t **ret_json, struct shd_err *e)
{
    json_t *all = json_array();
    int r = SHD_OK;
    for (uint32_t from = 0; from < hosts->count; from++) {
        for (uint32_t to = 0; r == SHD_OK && to < hosts->count; to++) {
            struct plan_crossing c;
            if (from == to)
                continue;
            r = plan_crossing(spec, ask, hosts, from, to, &c, e);
            if (r == SHD_OK)
                json_array_append_new(
                    all, json_pack("{s:s, s:s, s:I, s:I}", "from", hosts->items[from].name, "to",
                                   hosts->items[to].name, "parameters_bytes",
                                   (json_int_t)c.parameters_bytes, "gradients_bytes",
                                   (json_int_t)c.gradients_bytes));
        }
    }
    if (r == SHD_OK)
        *ret_json = all;
    else
        json_decref(all);
    return r;
}
