/* shardctl export: pin a step, write what workers read of it as a safetensors file, let go; again
 * with --follow. A file is written under another name, synced, and renamed: what has its name is
 * whole, and LATEST names the last one. With --memory files are this process's memory
 * (export_memory.h), and it stays for them. */
#include "client/ctl/state/export.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

#include "client/checkpoint/dir.h"
#include "client/ctl/base/say.h"
#include "client/ctl/base/verb.h"
#include "client/ctl/state/export_memory.h"
#include "client/ctl/state/weights.h"
#include "client/session/hub.h"
#include "client/session/session.h"
#include "proto/base/clock.h"
#include "proto/base/dir.h"

#define TIMEOUT_MS  120000u /* of a session that stays: keepers need 30 s for who hangs */
#define LATEST      "LATEST"
#define LATEST_PART ".LATEST.export" /* before it has its name */
#define FILE_PART   ".export.partial"
#define STEP_NAME   "step-%012" PRIu64 ".safetensors"

static const char export_about[] =
    "Write a model's weights as DIR/step-N.safetensors and point DIR/LATEST to it, while training\n"
    "goes on: exactly one step, in the type that workers read (the spec's `publish`), as other "
    "tools\nload it. For optimizer state, too, see `shardctl checkpoint`.\n"
    "With --follow again and again: each step that is there when the one before is written, or "
    "with\n--every the multiples of N, those left out that were over by then.\n"
    "With --memory the file is memory of this process, by a path that is printed, and gone with "
    "it;\nDIR, if there is one, gets links to it. Behind -- a command, which becomes this process.";

static const char export_more[] = VERB_WHERE
    "\n"
    "examples:\n"
    "  shardctl export /data/weights\n"
    "  shardctl export /data/weights --follow --every 50     stays while the daemons run\n"
    "  shardctl export --memory -- python eval.py {}         {}: a path to the weights, in memory\n"
    "  shardctl export /tmp/weights --memory --follow        links to the last two steps in "
    "memory\n"
    "\n--follow, --memory: SIGINT and SIGTERM end it with 0, after the file at hand.\n"
    "exit code 1: nothing was written; the reason is on stderr\n";

struct ask {
    const char *dir, *address, *model;
    uint32_t every, keep; /* keep: 0: all */
    bool follow, memory, ema, json;
    char **command; /* borrowed, NULL at its end; NULL: none */
};

struct target {                   /* where files go */
    int dir_fd;                   /* owned; -1: there is no directory */
    struct export_memory *memory; /* owned; NULL: to the directory */
};

static volatile sig_atomic_t stopped;

static void stop(int sig)
{
    stopped = sig;
}

static int is_stopped(void *ctx)
{
    (void)ctx;
    return stopped != 0;
}

/* -- A file ------------------------------------------------------------------------------------ */

static int write_pinned(const shd_model *m, int fd, const char *name, uint64_t *ret_bytes,
                        struct shd_err *e)
{
    struct weights w;
    int r = weights_new(m, &w, e);
    if (r != SHD_OK)
        return r;
    *ret_bytes = w.header.file_bytes;
    r = weights_write(&w, fd, name, e);
    weights_free(&w);
    if (r == SHD_OK && fsync(fd) != 0)
        r = err_sys(e, SHD_EIO, "sync '%s'", name);
    return r;
}

static int rename_to(int dir_fd, const char *from, const char *to, struct shd_err *e)
{
    if (renameat(dir_fd, from, dir_fd, to) != 0)
        return err_sys(e, SHD_EIO, "rename '%s' to '%s'", from, to);
    return fsync(dir_fd) == 0 ? SHD_OK : err_sys(e, SHD_EIO, "sync the directory of '%s'", to);
}

static int write_latest(int dir_fd, const char *name, struct shd_err *e)
{
    char line[CHECKPOINT_NAME_BYTES + 32];
    snprintf(line, sizeof line, "%s\n", name);
    unlinkat(dir_fd, LATEST_PART, 0);
    const int r = checkpoint_write(dir_fd, LATEST_PART, line, (uid_t)-1, e);
    return r == SHD_OK ? rename_to(dir_fd, LATEST_PART, LATEST, e) : r;
}

/* The pinned step, whole or not at all. */
static int write_step(const shd_model *m, int dir_fd, const char *name, uint64_t *ret_bytes,
                      struct shd_err *e)
{
    int fd = -1;
    unlinkat(dir_fd, FILE_PART, 0);
    int r = checkpoint_create(dir_fd, FILE_PART, 0, (uid_t)-1, &fd, e);
    if (r != SHD_OK)
        return r;
    r = write_pinned(m, fd, name, ret_bytes, e);
    close(fd);
    if (r == SHD_OK)
        r = rename_to(dir_fd, FILE_PART, name, e);
    else
        unlinkat(dir_fd, FILE_PART, 0);
    return r == SHD_OK ? write_latest(dir_fd, name, e) : r;
}

/* -- Files before it --------------------------------------------------------------------------- */

/* Exactly a name that we give. */
static bool step_of(const char *name, uint64_t *ret_step)
{
    char again[CHECKPOINT_NAME_BYTES + 16];
    if (sscanf(name, "step-%" SCNu64, ret_step) != 1)
        return false;
    snprintf(again, sizeof again, STEP_NAME, *ret_step);
    return strcmp(again, name) == 0;
}

/* How many files of steps below `step` there are, and the oldest of them. */
static int count_before(int dir_fd, uint64_t step, uint32_t *ret_count, uint64_t *ret_oldest,
                        struct shd_err *e)
{
    const int fd = openat(dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
    const char *name;
    uint64_t at;
    if (dir == NULL) {
        const int r = err_sys(e, SHD_EIO, "list what is exported");
        if (fd >= 0)
            close(fd);
        return r;
    }
    *ret_count = 0;
    *ret_oldest = UINT64_MAX;
    while ((name = dir_next(&dir)) != NULL) {
        if (!step_of(name, &at) || at >= step)
            continue;
        ++*ret_count;
        *ret_oldest = at < *ret_oldest ? at : *ret_oldest;
    }
    return SHD_OK;
}

/* Leave `keep` files, that of `step` among them. Those of later steps, of a run before, are not
 * ours to judge. */
static int remove_old(int dir_fd, uint64_t step, uint32_t keep, struct shd_err *e)
{
    char name[CHECKPOINT_NAME_BYTES + 16];
    uint64_t oldest = 0;
    uint32_t count = 0;
    int r = count_before(dir_fd, step, &count, &oldest, e);
    while (r == SHD_OK && count >= keep) {
        snprintf(name, sizeof name, STEP_NAME, oldest);
        if (unlinkat(dir_fd, name, 0) != 0 && errno != ENOENT)
            return err_sys(e, SHD_EIO, "remove '%s'", name);
        r = count_before(dir_fd, step, &count, &oldest, e);
    }
    return r;
}

/* -- Steps ------------------------------------------------------------------------------------- */

/* place: the file's name in the directory, or its path in memory. */
static void print_step(const struct ask *ask, const char *place, uint64_t step, uint64_t bytes,
                       const shd_model *m)
{
    if (ask->json)
        verb_json(json_pack("{s:s, s:s, s:I, s:I}", ask->memory ? "path" : "name", place, "model",
                            shd_model_name(m), "step", (json_int_t)step, "bytes",
                            (json_int_t)bytes),
                  JSON_COMPACT, stdout);
    else if (ask->memory)
        printf("%s model=%s step=%" PRIu64 " bytes=%" PRIu64 "\n", place, shd_model_name(m), step,
               bytes);
    else
        printf("wrote %s/%s model=%s bytes=%" PRIu64 "\n", ask->dir, place, shd_model_name(m),
               bytes);
    fflush(stdout);
}

static int hold_step(const struct ask *ask, const shd_model *m, const struct target *to,
                     const char *name, uint64_t step, struct shd_err *e)
{
    uint64_t bytes = 0;
    int r = export_memory_add(to->memory, m, name, &bytes, e);
    if (r == SHD_OK && to->dir_fd >= 0)
        r = write_latest(to->dir_fd, name, e);
    if (r == SHD_OK && ask->command == NULL)
        print_step(ask, export_memory_path(to->memory), step, bytes, m);
    return r;
}

/* From a step on; *ret_step: which one it was. */
static int export_one(const struct ask *ask, shd_model *m, const struct target *to, uint64_t from,
                      uint64_t *ret_step, struct shd_err *e)
{
    const struct shd_pin_options pin = {
        .size = sizeof pin, .step = from, .every = ask->every, .wait = true, .ema = ask->ema
    };
    char name[CHECKPOINT_NAME_BYTES + 16];
    uint64_t bytes = 0;
    int r = shd_pin(m, &pin, ret_step, e);
    if (r != SHD_OK)
        return r;
    snprintf(name, sizeof name, STEP_NAME, *ret_step);
    if (to->memory != NULL)
        return hold_step(ask, m, to, name, *ret_step, e);
    r = write_step(m, to->dir_fd, name, &bytes, e);
    if (r == SHD_OK && ask->keep > 0)
        r = remove_old(to->dir_fd, *ret_step, ask->keep, e);
    if (r == SHD_OK)
        print_step(ask, name, *ret_step, bytes, m);
    return r;
}

/* Until the daemons are gone, or we are told to stop: both are a good end. */
static int export_all(const struct ask *ask, shd_model *m, const struct target *to,
                      struct shd_err *e)
{
    uint64_t step = 0;
    int r = export_one(ask, m, to, 0, &step, e);
    while (ask->follow && r == SHD_OK && !stopped)
        r = export_one(ask, m, to, step + 1, &step, e);
    shd_unpin(m);
    const bool gone = ask->follow && r == SHD_EGONE;
    return gone || (stopped && r == SHD_ECANCELED) ? SHD_OK : r;
}

/* Nobody takes weights that have been rounded more than their type says for others unawares. */
static void say_codec(const struct spec *spec)
{
    if (spec->codec != CODEC_NONE)
        fprintf(stderr,
                "shardctl: model '%s' is published in codes (codec: %s), and exported is what they "
                "decode to; a checkpoint has the parameters themselves, in fp32\n",
                spec->name, codec_name(spec->codec));
}

static int export_to(const struct ask *ask, const struct target *to, struct shd_err *e)
{
    const struct shd_options options = { .size = sizeof options,
                                         .address = ask->address,
                                         .name = "shardctl export",
                                         .timeout_ms = ask->follow ? TIMEOUT_MS : VERB_TIMEOUT_MS,
                                         .idle = is_stopped,
                                         .reader = true };
    shd_session *s;
    shd_model *m = NULL;
    int r = shd_connect(&options, &s, e);
    if (r != SHD_OK)
        return r;
    r = shd_model_attach(s, ask->model, &m, e);
    if (r == SHD_OK)
        say_codec(m->spec);
    if (r == SHD_OK)
        r = export_all(ask, m, to, e);
    shd_close(s);
    return r;
}

static int open_dir(const char *dir, int *ret_fd, struct shd_err *e)
{
    if (mkdir(dir, 0777) != 0 && errno != EEXIST)
        return err_sys(e, SHD_EIO, "make directory '%.150s'", dir);
    *ret_fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return *ret_fd >= 0 ? SHD_OK : err_sys(e, SHD_EIO, "open directory '%.150s'", dir);
}

/* What was exported is in this process alone: it stays until it is told to end. */
static void stay(void)
{
    sigset_t ends, before;
    sigemptyset(&ends);
    sigaddset(&ends, SIGINT);
    sigaddset(&ends, SIGTERM);
    sigaddset(&ends, SIGHUP);
    sigprocmask(SIG_BLOCK, &ends, &before);
    while (!stopped)
        sigsuspend(&before);
    sigprocmask(SIG_SETMASK, &before, NULL);
}

/* Nothing is attached to the daemons any more. */
static int after(const struct ask *ask, const struct target *to, struct shd_err *e)
{
    if (to->memory == NULL || export_memory_path(to->memory)[0] == '\0')
        return SHD_OK;
    if (ask->command != NULL)
        return export_memory_exec(to->memory, ask->command, e);
    stay();
    return SHD_OK;
}

/* It names a link that went with its file. */
static void remove_latest(int dir_fd)
{
    char name[CHECKPOINT_NAME_BYTES + 32];
    struct stat st;
    const int fd = openat(dir_fd, LATEST, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    const ssize_t bytes = fd >= 0 ? read(fd, name, sizeof name - 1) : -1;
    if (fd >= 0)
        close(fd);
    if (bytes <= 0)
        return;
    name[bytes] = '\0';
    name[strcspn(name, "\n")] = '\0';
    if (fstatat(dir_fd, name, &st, AT_SYMLINK_NOFOLLOW) != 0 && errno == ENOENT)
        unlinkat(dir_fd, LATEST, 0);
}

static int run(const struct ask *ask, struct shd_err *e)
{
    struct target to = { .dir_fd = -1 };
    int r = ask->dir != NULL ? open_dir(ask->dir, &to.dir_fd, e) : SHD_OK;
    if (r == SHD_OK && ask->memory)
        r = export_memory_new(ask->keep > 0 ? ask->keep : EXPORT_MEMORY_KEEP, to.dir_fd, &to.memory,
                              e);
    signal(SIGXFSZ, SIG_IGN); /* a limit on file sizes is an error with a name */
    const bool stays = ask->memory && ask->command == NULL;
    if (ask->follow || stays) {
        signal(SIGINT, stop);
        signal(SIGTERM, stop);
    }
    if (stays)
        signal(SIGHUP, stop);
    if (r == SHD_OK)
        r = export_to(ask, &to, e);
    if (r == SHD_OK)
        r = after(ask, &to, e);
    export_memory_free(to.memory);
    if (ask->memory && to.dir_fd >= 0)
        remove_latest(to.dir_fd);
    if (to.dir_fd >= 0)
        close(to.dir_fd);
    return r;
}

/* What stands behind "--" is the command: cut it off. */
static char **take_command(int *argc, char **argv)
{
    for (int i = 1; i < *argc; i++) {
        if (strcmp(argv[i], "--") != 0)
            continue;
        *argc = i;
        return argv + i + 1;
    }
    return NULL;
}

/* Returns -1: what is asked for fits together. */
static int check(const struct ask *ask)
{
    bool placed = false;
    for (char **word = ask->command; word != NULL && *word != NULL; word++)
        placed = placed || strstr(*word, "{}") != NULL;
    if (ask->dir == NULL && !ask->memory)
        return ctl_usage("no directory: shardctl export DIR, or --memory");
    if (ask->memory && ask->keep > EXPORT_MEMORY_MAX)
        return ctl_usage("--keep %" PRIu32 ": at most %u files in memory", ask->keep,
                         EXPORT_MEMORY_MAX);
    if (ask->command == NULL)
        return -1;
    if (!ask->memory)
        return ctl_usage("a command gets weights in memory: shardctl export --memory -- CMD {}");
    if (ask->follow || ask->dir != NULL)
        return ctl_usage("a command gets one step, and no %s: leave %s out",
                         ask->follow ? "others" : "links", ask->follow ? "--follow" : ask->dir);
    if (!placed)
        return ctl_usage("no {} in the command, which is where the path of the weights goes");
    return -1;
}

int verb_export(int argc, char **argv)
{
    struct ask ask = { .dir = NULL };
    struct shd_err e = { 0 };
    const struct flag table[] = {
        VERB_ADDRESS_FLAGS(ask.address),
        { "model", 'm', FLAG_STRING, "NAME", "which model (the only one there)", &ask.model, 0, 0 },
        { "memory", 0, FLAG_BOOL, NULL, "in memory of this process, which stays for it",
          &ask.memory, 0, 0 },
        { "follow", 'f', FLAG_BOOL, NULL, "stay, and write what comes", &ask.follow, 0, 0 },
        { "ema", 0, FLAG_BOOL, NULL, "the moving average of the parameters, where the spec has one",
          &ask.ema, 0, 0 },
        { "every", 0, FLAG_U32, "N", "only steps that are multiples of N (any)", &ask.every, 1,
          UINT32_MAX },
        { "keep", 0, FLAG_U32, "N", "remove files of steps before the last N (none; in memory 2)",
          &ask.keep, 1, UINT32_MAX },
        { "json", 'j', FLAG_BOOL, NULL,
          "one JSON object a line: name (in memory path), model, step, bytes", &ask.json, 0, 0 },
    };
    const struct flags flags = VERB_FLAGS(export, "shardctl export [DIR] [FLAGS] [-- CMD {}]",
                                          table);
    const char *more;
    ask.command = take_command(&argc, argv);
    int code = verb_start_word(&flags, argc, argv, &ask.dir, &more);
    if (code >= 0)
        return code;
    if (more != NULL)
        return ctl_usage("one directory at a time, got '%s' as well", more);
    code = check(&ask);
    if (code >= 0)
        return code;
    return run(&ask, &e) == SHD_OK ? CTL_OK : ctl_fail("%s", e.text);
}
