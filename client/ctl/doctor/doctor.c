/* shardctl doctor: the table of checks, and how findings are shown. */
#include "client/ctl/doctor/doctor.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <jansson.h>

#include "client/ctl/base/rundir.h"
#include "client/ctl/base/say.h"
#include "client/ctl/base/verb.h"
#include "client/ctl/doctor/doctor_daemons.h"
#include "client/ctl/doctor/doctor_gpu.h"
#include "client/ctl/doctor/doctor_host.h"
#include "client/session/where.h"
#include "client/shd.h"
#include "proto/base/check.h"

static const char doctor_about[] =
    "Look at everything on this host that shardd depends on, and say of each whether it is fine\n"
    "(ok), could be better (warn) or will not work (fail), with what to do about it. Nothing is\n"
    "changed. Run it as the user that has the question: limits and permissions differ by user.";

static const char doctor_more[] = VERB_WHERE
    "\n"
    "examples:\n"
    "  shardctl doctor\n"
    "  shardctl doctor --checkpoint /srv/checkpoints --quiet\n"
    "  shardctl doctor --json | jq -r '.findings[] | select(.level != \"ok\").found'\n"
    "\n"
    "exit code 1: something is marked fail\n";

static const struct {
    const char *name;
    void (*fn)(struct doctor *d);
} checks[] = {
    { "kernel", doctor_kernel },
    { "limits", doctor_limits },
    { "memory", doctor_memory },
    { "cpu", doctor_cpu },
    { "gemm", doctor_gemm },
    { "systemd", doctor_systemd },
    { "runtime", doctor_runtime },
    { "daemons", doctor_daemons },
    { "leftovers", doctor_leftovers },
    { "checkpoint", doctor_checkpoint },
    { "gpu", doctor_gpu },
};

static const char *const level_names[DOCTOR_LEVELS] = { "ok", "warn", "fail" };

/* -- Showing --------------------------------------------------------------------------------- */

struct text_sink {
    bool quiet, color;
};

static void found_text(struct doctor *d, enum doctor_level level, const char *what,
                       const char *remedy)
{
    static const char *const colors[DOCTOR_LEVELS] = { "\033[32m", "\033[33m", "\033[31m" };
    const struct text_sink *sink = d->sink;
    if (sink->quiet && level == DOCTOR_OK)
        return;
    printf("%s%-6s%s%-12s%s\n", sink->color ? colors[level] : "", level_names[level],
           sink->color ? "\033[0m" : "", d->check, what);
    if (remedy != NULL)
        printf("%18s-> %s\n", "", remedy);
    fflush(stdout); /* a check may take a while: show what is known */
}

static void found_json(struct doctor *d, enum doctor_level level, const char *what,
                       const char *remedy)
{
    json_array_append_new(d->sink, json_pack("{s:s, s:s, s:s, s:s?}", "check", d->check, "level",
                                             level_names[level], "found", what, "remedy", remedy));
}

static void run_checks(struct doctor *d)
{
    for (size_t i = 0; i < ARRAY_SIZE(checks); i++) {
        d->check = checks[i].name;
        checks[i].fn(d);
    }
}

static void show_text(struct doctor *d, bool quiet)
{
    const char *no_color = getenv("NO_COLOR");
    struct text_sink sink = { quiet, isatty(STDOUT_FILENO) && (no_color == NULL || !*no_color) };
    d->found = found_text;
    d->sink = &sink;
    run_checks(d);
    printf("%u ok, %u warn, %u fail\n", d->counts[DOCTOR_OK], d->counts[DOCTOR_WARN],
           d->counts[DOCTOR_FAIL]);
}

static void show_json(struct doctor *d)
{
    json_t *findings = json_array();
    d->found = found_json;
    d->sink = findings;
    run_checks(d);
    json_t *root = json_pack("{s:i, s:s, s:s, s:O, s:i, s:i, s:i}", "schema", 1, "version",
                             SHD_VERSION, "runtime_dir", d->runtime_dir, "findings", findings, "ok",
                             (int)d->counts[DOCTOR_OK], "warn", (int)d->counts[DOCTOR_WARN], "fail",
                             (int)d->counts[DOCTOR_FAIL]);
    verb_json(root, JSON_INDENT(2), stdout);
    json_decref(findings);
}

int verb_doctor(int argc, char **argv)
{
    struct doctor d = { .runtime_dir = NULL };
    const char *address = NULL;
    char dir[RUNDIR_PATH_BYTES] = WHERE_DEFAULT;
    struct shd_err e = { 0 };
    bool as_json = false, quiet = false;
    const struct flag table[] = {
        { "address", 'a', FLAG_STRING, "A", "where the daemons' sockets are", &address, 0, 0 },
        { "runtime-dir", 'r', FLAG_STRING, "DIR", "the same", &address, 0, 0 },
        { "checkpoint", 'c', FLAG_STRING, "DIR", "try whether checkpoints can be written here",
          &d.checkpoint, 0, 0 },
        { "quiet", 'q', FLAG_BOOL, NULL, "only what is not ok", &quiet, 0, 0 },
        { "json", 'j', FLAG_BOOL, NULL, "one JSON document: schema, findings[], counts", &as_json,
          0, 0 },
    };
    const struct flags flags = VERB_FLAGS(doctor, "shardctl doctor [FLAGS]", table);
    const int code = verb_start(&flags, argc, argv, /* ret_rest= */ NULL);
    if (code >= 0)
        return code;
    if (updir_find(address, dir, &e) != SHD_OK)
        d.nowhere = e.text;
    d.runtime_dir = dir;
    if (as_json)
        show_json(&d);
    else
        show_text(&d, quiet);
    return d.counts[DOCTOR_FAIL] > 0 ? CTL_FAILED : CTL_OK;
}
