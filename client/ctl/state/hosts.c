/* See hosts.h. */
#include "client/ctl/state/hosts.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/checkpoint/refill.h"
#include "client/ctl/base/pairs.h"
#include "client/ctl/base/rundir.h"
#include "client/ctl/base/say.h"
#include "client/ctl/base/text.h"
#include "client/ctl/base/verb.h"
#include "proto/files/arbiter.h"
#include "proto/files/replicas.h"

#define CLAIMS_MAX 16  /* lost to others, one after the other */
#define AGAIN_S    10u /* between two looks of --watch */

static const char hosts_about[] =
    "Show which hosts of a cluster with replicas are in and which are out, as its arbiter has it.\n"
    "Workers go on without a host that is out, by the other copy of each slice, and a host that is "
    "out\n"
    "holds nothing that counts any more.";

static const char hosts_more[] =
    "--out HOST: say that a host is lost, as workers do by themselves when they find it so. Its\n"
    "daemons' copies count no more from then on, also if it lives: workers there go on by the\n"
    "other copies. Refused where it has the only copy of a slice.\n"
    "\n"
    "--in HOST --by DIR: fill the copies of a host that is out, and whose daemons run again, and "
    "let it\n"
    "come in: the others write a checkpoint of each model into DIR, which all hosts have at the "
    "same\n"
    "path, the host restores it, and models go back to its step, as by `shardctl rewind`. Workers "
    "go\n"
    "along and need no restart. Relays need --files for it (`shardctl host --files`).\n"
    "\n" VERB_WHERE "There `shardctl host --replicas 2` keeps replicas.json, which names the "
    "arbiter.\n"
    "\n"
    "examples:\n"
    "  shardctl hosts\n"
    "  shardctl hosts --out b --json\n"
    "  shardctl hosts --in b --by /shared/refill\n"
    "\nexit code 1: no replicas here, the arbiter cannot be reached, or HOST cannot be out, or "
    "in\n";

struct hosts {
    char dir[RUNDIR_PATH_BYTES]; /* of the sockets */
    struct replicas replicas;
    struct pairs pairs;
    struct arbiter *arbiter;
    struct arbiter_view view;
};

static int open_all(const char *where, struct hosts *h, struct shd_err *e)
{
    int r = updir_find(where, h->dir, e);
    if (r != SHD_OK)
        return r;
    r = replicas_read(h->dir, &h->replicas, e);
    if (r == SHD_ENOENT)
        return err_set(e, r,
                       "no replicas here: '%.100s' has no " REPLICAS_FILE ", as `shardctl host "
                       "--replicas 2` writes it",
                       h->dir);
    if (r == SHD_OK)
        r = pairs_make(&h->replicas, &h->pairs, e);
    if (r == SHD_OK)
        r = arbiter_open(h->replicas.arbiter, h->replicas.cluster, &h->arbiter, e);
    return r == SHD_OK ? arbiter_read(h->arbiter, &h->view, e) : r;
}

static void close_all(struct hosts *h)
{
    arbiter_view_free(&h->view);
    arbiter_close(h->arbiter);
    pairs_free(&h->pairs);
    replicas_free(&h->replicas);
}

static bool is_out(const struct hosts *h, uint32_t host)
{
    return arbiter_view_has(&h->view, h->replicas.hosts[host].name);
}

/* The other host of a pair; host_count: the pair is not of this one. */
static uint32_t other_host(const struct hosts *h, const struct pair *pair, uint32_t host)
{
    if (pair->primary_host == host)
        return pair->secondary_host;
    return pair->secondary_host == host ? pair->primary_host : h->replicas.host_count;
}

/* -- Out --------------------------------------------------------------------------------------- */

static int no_such_host(const struct hosts *h, const char *name, struct shd_err *e)
{
    const char **names = calloc(h->replicas.host_count, sizeof *names);
    char near[128] = "";
    for (uint32_t i = 0; names != NULL && i < h->replicas.host_count; i++)
        names[i] = h->replicas.hosts[i].name;
    if (names != NULL)
        suggest(name, names, h->replicas.host_count, "", near, sizeof near);
    free(names);
    return err_set(e, SHD_ENOENT, "there is no host '%.60s' with devices%s", name, near);
}

static bool is_filling(const struct hosts *h, uint32_t host)
{
    const struct arbiter_behind *behind = arbiter_view_behind(&h->view,
                                                              h->replicas.hosts[host].name);
    return behind != NULL && behind->filling;
}

/* Whether the host's copy of a pair is the only one that counts: the other host is out, or may lack
 * steps yet. */
static bool is_last(const struct hosts *h, const struct pair *pair, uint32_t host)
{
    const uint32_t other = other_host(h, pair, host);
    return other < h->replicas.host_count && (is_out(h, other) || is_filling(h, other));
}

static int check_not_last(const struct hosts *h, uint32_t host, struct shd_err *e)
{
    for (uint32_t i = 0; i < h->pairs.count; i++) {
        const struct pair *pair = &h->pairs.pairs[i];
        const uint32_t other = other_host(h, pair, host);
        if (is_last(h, pair, host))
            return err_set(
                e, SHD_EEXIST, "host '%s' has the only copy of slice %" PRIu32 " (%s+%s): '%s' %s",
                h->replicas.hosts[host].name, i, pair->primary, pair->secondary,
                h->replicas.hosts[other].name,
                is_out(h, other) ? "is out already" : "is being filled, and may lack steps");
    }
    return SHD_OK;
}

/* One that is out already stays so: what is asked for is so. */
static int put_out(struct hosts *h, const char *name, struct shd_err *e)
{
    const struct replicas_host *found = replicas_by_name(&h->replicas, name);
    if (found == NULL)
        return no_such_host(h, name, e);
    const uint32_t host = (uint32_t)(found - h->replicas.hosts);
    int r = SHD_EBUSY;
    for (int i = 0; r == SHD_EBUSY && i < CLAIMS_MAX; i++) {
        struct arbiter_view next = { 0 };
        if (is_out(h, host))
            return SHD_OK;
        r = check_not_last(h, host, e);
        if (r == SHD_OK)
            r = arbiter_view_next(&h->view, name, &next, e);
        if (r == SHD_OK)
            r = arbiter_claim(h->arbiter, &next, e);
        arbiter_view_free(&next);
        if (r != SHD_OK && r != SHD_EBUSY)
            return r;
        arbiter_view_free(&h->view);
        const int read = arbiter_read(h->arbiter, &h->view, e);
        if (read != SHD_OK)
            return read;
    }
    return r;
}

/* -- In ---------------------------------------------------------------------------------------- */

static void tell(void *ctx, const char *line)
{
    (void)ctx;
    ctl_say("%s", line);
}

static int fill(struct hosts *h, const char *name, const char *by, struct shd_err *e)
{
    static char address[DEVICES_ADDRESS_BYTES(RUNDIR_PATH_BYTES)];
    if (replicas_by_name(&h->replicas, name) == NULL)
        return no_such_host(h, name, e);
    pairs_address(&h->pairs, h->dir, address, sizeof address);
    const struct refill refill = { .address = address, .host = name, .dir = by, .say = tell };
    const int r = refill_host(&refill, e);
    if (r != SHD_OK)
        return r;
    arbiter_view_free(&h->view);
    return arbiter_read(h->arbiter, &h->view, e);
}

/* Never ends: whenever the host is out it is filled. What is wrong is said once. */
static void keep_in(struct hosts *h, const char *name, const char *by)
{
    struct shd_err said = { 0 };
    for (;; sleep(AGAIN_S)) {
        struct shd_err e = { 0 };
        const int r = fill(h, name, by, &e);
        if (r == SHD_OK || r == SHD_EEXIST) /* it is in */
            e = (struct shd_err){ 0 };
        else if (strcmp(e.text, said.text) != 0)
            ctl_say("host '%s' is not filled, and is tried again every %u s: %s", name, AGAIN_S,
                    e.text);
        said = e;
    }
}

/* -- Showing ----------------------------------------------------------------------------------- */

/* Hosts that have the other copies of a host's slices, each once: fn for each. */
static void each_partner(const struct hosts *h, uint32_t host, void (*fn)(void *, const char *name),
                         void *arg)
{
    for (uint32_t other = 0; other < h->replicas.host_count; other++)
        for (uint32_t i = 0; i < h->pairs.count; i++)
            if (other_host(h, &h->pairs.pairs[i], host) == other && other != host) {
                fn(arg, h->replicas.hosts[other].name);
                break;
            }
}

/* Slices of which it has the only copy that counts. */
static uint32_t alone(const struct hosts *h, uint32_t host)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < h->pairs.count && !is_out(h, host) && !is_filling(h, host); i++)
        count += is_last(h, &h->pairs.pairs[i], host);
    return count;
}

struct cell { /* names, as many as there is room for */
    char text[TABLE_CELL_BYTES_MAX];
    bool cut;
};

static void add_to_cell(void *arg, const char *name)
{
    static const char more[] = "...";
    struct cell *cell = arg;
    const size_t used = strlen(cell->text), room = sizeof cell->text - used;
    const char *comma = used > 0 ? "," : "";
    if (cell->cut)
        return;
    const int n = snprintf(cell->text + used, room, "%s%s", comma, name);
    cell->cut = n < 0 || (size_t)n + sizeof more >= room;
    if (cell->cut)
        snprintf(cell->text + used, room, "%s%s", comma, more);
}

static const char *state_of(const struct hosts *h, uint32_t host)
{
    if (is_out(h, host))
        return "out";
    return is_filling(h, host) ? "filling" : "in";
}

static void show_host(const struct hosts *h, uint32_t host, struct table *t)
{
    struct cell devices = { .cut = false }, partners = { .cut = false };
    char count[16], device[CLUSTER_DEVICE_BYTES];
    for (const char *at = h->replicas.hosts[host].devices; cluster_next_device(&at, device);)
        add_to_cell(&devices, device);
    each_partner(h, host, add_to_cell, &partners);
    snprintf(count, sizeof count, "%" PRIu32, alone(h, host));
    table_row(t, (const char *const[]){ h->replicas.hosts[host].name, state_of(h, host),
                                        devices.text, partners.text, count });
}

static void show(const struct hosts *h)
{
    static const char *const headings[] = { "HOST", "STATE", "DEVICES", "COPIES ON", "ALONE" };
    char arbiter[TEXT_BYTES * 4];
    struct table t;
    text_init();
    printf("view %" PRIu64 " of cluster %s, at %s%s\n", h->view.number, h->replicas.cluster,
           text_clean(h->replicas.arbiter, arbiter, sizeof arbiter),
           h->view.number == 0 ? ": no host was ever out" : "");
    table_init(&t, headings, ARRAY_SIZE(headings));
    for (uint32_t i = 0; i < h->replicas.host_count; i++)
        show_host(h, i, &t);
    for (uint32_t i = 0; i < h->view.out_count; i++) /* of a cluster file that is another by now */
        if (replicas_by_name(&h->replicas, h->view.out[i]) == NULL)
            table_row(&t, (const char *const[]){ h->view.out[i], "out", "-", "-", "0" });
    table_print(&t, "  ", stdout);
    table_deinit(&t);
}

static void add_to_array(void *arg, const char *name)
{
    json_array_append_new(arg, json_string(name));
}

static json_t *host_json(const struct hosts *h, uint32_t host)
{
    char device[CLUSTER_DEVICE_BYTES];
    json_t *devices = json_array(), *partners = json_array();
    for (const char *at = h->replicas.hosts[host].devices; cluster_next_device(&at, device);)
        json_array_append_new(devices, json_string(device));
    each_partner(h, host, add_to_array, partners);
    return json_pack("{s:s, s:b, s:s, s:o, s:o, s:I}", "name", h->replicas.hosts[host].name, "out",
                     is_out(h, host), "state", state_of(h, host), "devices", devices, "copies_on",
                     partners, "alone", (json_int_t)alone(h, host));
}

static void show_json(const struct hosts *h)
{
    json_t *hosts = json_array(), *slices = json_array();
    for (uint32_t i = 0; i < h->replicas.host_count; i++)
        json_array_append_new(hosts, host_json(h, i));
    for (uint32_t i = 0; i < h->view.out_count; i++)
        if (replicas_by_name(&h->replicas, h->view.out[i]) == NULL)
            json_array_append_new(hosts, json_pack("{s:s, s:b, s:s, s:[], s:[], s:i}", "name",
                                                   h->view.out[i], "out", 1, "state", "out",
                                                   "devices", "copies_on", "alone", 0));
    for (uint32_t i = 0; i < h->pairs.count; i++)
        json_array_append_new(
            slices, json_pack("[s, s]", h->pairs.pairs[i].primary, h->pairs.pairs[i].secondary));
    verb_json(json_pack("{s:i, s:I, s:s, s:s, s:o, s:o}", "schema", 1, "view",
                        (json_int_t)h->view.number, "cluster", h->replicas.cluster, "arbiter",
                        h->replicas.arbiter, "hosts", hosts, "pairs", slices),
              JSON_INDENT(2), stdout);
}

int verb_hosts(int argc, char **argv)
{
    const char *where = NULL, *out = NULL, *in = NULL, *by = NULL;
    bool as_json = false, watch = false;
    const struct flag table[] = {
        VERB_ADDRESS_FLAGS(where),
        { "out", 0, FLAG_STRING, "HOST", "this host is lost: its copies count no more", &out, 0,
          0 },
        { "in", 0, FLAG_STRING, "HOST", "fill this host, which is out, and let it come in", &in, 0,
          0 },
        { "by", 0, FLAG_STRING, "DIR", "a directory that all hosts have, for --in", &by, 0, 0 },
        { "watch", 0, FLAG_BOOL, NULL, "with --in: stay, and do it whenever HOST is found out",
          &watch, 0, 0 },
        { "json", 'j', FLAG_BOOL, NULL, "print JSON", &as_json, 0, 0 },
    };
    const struct flags flags = VERB_FLAGS(
        hosts, "shardctl hosts [--out HOST | --in HOST --by DIR] [FLAGS]", table);
    const int code = verb_start(&flags, argc, argv, NULL);
    if (code >= 0)
        return code;
    if (out != NULL && in != NULL)
        return ctl_usage("--out and --in: one at a time");
    if ((in != NULL) != (by != NULL))
        return ctl_usage("--in HOST says which, --by DIR by which directory: both are wanted");
    if (watch && in == NULL)
        return ctl_usage("--watch stays for a host to be filled: --in HOST --by DIR");
    struct hosts h = { .arbiter = NULL };
    struct shd_err e = { 0 };
    int r = open_all(where, &h, &e);
    if (r == SHD_OK && out != NULL)
        r = put_out(&h, out, &e);
    if (r == SHD_OK && watch)
        keep_in(&h, in, by);
    if (r == SHD_OK && in != NULL)
        r = fill(&h, in, by, &e);
    if (r == SHD_OK && as_json)
        show_json(&h);
    else if (r == SHD_OK)
        show(&h);
    close_all(&h);
    return r == SHD_OK ? CTL_OK : ctl_fail("%s", e.text);
}
