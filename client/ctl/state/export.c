/* shardctl export: pin a step, write what workers read of it as a safetensors file, let go; again
 * with --follow. A file is written under another name, synced, and renamed: what has its name is
 * whole, and LATEST names the last one. */
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
#include "client/session/hub.h"
#include "client/session/session.h"
#include "proto/base/clock.h"
#include "proto/base/dir.h"
#include "proto/base/sys.h"
#include "proto/files/ckpt.h"
#include "proto/files/safetensors.h"

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
    "with\n--every the multiples of N, those left out that were over by then.";

static const char export_more[] = VERB_WHERE
    "\n"
    "examples:\n"
    "  shardctl export /data/weights\n"
    "  shardctl export /data/weights --follow --every 50     stays while the daemons run\n"
    "  shardctl export /dev/shm/weights --follow --keep 2    for tools on this host, in memory\n"
    "\n--follow: SIGINT and SIGTERM end it with 0, after the file at hand.\n"
    "exit code 1: nothing was written; the reason is on stderr\n";

struct ask {
    const char *dir, *address, *model;
    uint32_t every, keep; /* keep: 0: all */
    bool follow, ema, json;
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

static enum safetensors_dtype dtype_of(enum shd_dtype dtype)
{
    return dtype == SHD_BF16  ? SAFETENSORS_BF16
           : dtype == SHD_F16 ? SAFETENSORS_F16
                              : SAFETENSORS_F32;
}

/* All tensors of the spec, in its order; the caller's to free. */
static struct safetensors_tensor *tensors_of(const struct spec *spec)
{
    struct safetensors_tensor *tensors = sys_calloc(spec->tensor_count, sizeof *tensors);
    for (uint32_t t = 0; tensors != NULL && t < spec->tensor_count; t++) {
        const struct spec_tensor *from = &spec->tensors[t];
        tensors[t] = (struct safetensors_tensor){ .name = from->name,
                                                  .dtype = dtype_of(spec->publish),
                                                  .rank = from->rank };
        memcpy(tensors[t].shape, from->shape, sizeof from->shape);
    }
    return tensors;
}

static int write_unit(const shd_model *m, uint32_t unit, const struct safetensors_tensor *tensors,
                      int fd, const char *name, struct shd_err *e)
{
    const struct spec_unit *u = &m->spec->units[unit];
    const uint8_t *pinned = shd_pinned(m, unit);
    int r = SHD_OK;
    for (uint32_t t = u->first_tensor; r == SHD_OK && t < u->first_tensor + u->tensor_count; t++)
        r = ckpt_pwrite(fd,
                        pinned + m->spec->tensors[t].offset_elems * dtype_bytes(m->spec->publish),
                        tensors[t].bytes, tensors[t].at_bytes, name, e);
    return r;
}

static int write_pinned(const shd_model *m, int fd, const char *name, uint64_t *ret_bytes,
                        struct shd_err *e)
{
    struct safetensors_header header;
    struct safetensors_tensor *tensors = tensors_of(m->spec);
    if (tensors == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " tensors", m->spec->tensor_count);
    int r = safetensors_header(tensors, m->spec->tensor_count, &header, e);
    if (r == SHD_OK) {
        *ret_bytes = header.file_bytes;
        r = ckpt_pwrite(fd, header.data, header.bytes, 0, name, e);
        free(header.data);
    }
    for (uint32_t u = 0; r == SHD_OK && u < m->spec->unit_count; u++)
        r = write_unit(m, u, tensors, fd, name, e);
    free(tensors);
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

/* The pinned step, whole or not at all. */
static int write_step(const shd_model *m, int dir_fd, const char *name, uint64_t *ret_bytes,
                      struct shd_err *e)
{
    char line[CHECKPOINT_NAME_BYTES + 32];
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
    snprintf(line, sizeof line, "%s\n", name);
    unlinkat(dir_fd, LATEST_PART, 0);
    if (r == SHD_OK)
        r = checkpoint_write(dir_fd, LATEST_PART, line, (uid_t)-1, e);
    return r == SHD_OK ? rename_to(dir_fd, LATEST_PART, LATEST, e) : r;
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

static void print_written(const struct ask *ask, const char *name, uint64_t step, uint64_t bytes,
                          const shd_model *m)
{
    if (ask->json)
        verb_json(json_pack("{s:s, s:s, s:I, s:I}", "name", name, "model", shd_model_name(m),
                            "step", (json_int_t)step, "bytes", (json_int_t)bytes),
                  JSON_COMPACT, stdout);
    else
        printf("wrote %s/%s model=%s bytes=%" PRIu64 "\n", ask->dir, name, shd_model_name(m),
               bytes);
    fflush(stdout);
}

/* From a step on; *ret_step: which one it was. */
static int export_one(const struct ask *ask, shd_model *m, int dir_fd, uint64_t from,
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
    r = write_step(m, dir_fd, name, &bytes, e);
    if (r == SHD_OK && ask->keep > 0)
        r = remove_old(dir_fd, *ret_step, ask->keep, e);
    if (r == SHD_OK)
        print_written(ask, name, *ret_step, bytes, m);
    return r;
}

/* Until the daemons are gone, or we are told to stop: both are a good end. */
static int export_all(const struct ask *ask, shd_model *m, int dir_fd, struct shd_err *e)
{
    uint64_t step = 0;
    int r = export_one(ask, m, dir_fd, 0, &step, e);
    while (ask->follow && r == SHD_OK && !stopped)
        r = export_one(ask, m, dir_fd, step + 1, &step, e);
    shd_unpin(m);
    const bool gone = ask->follow && r == SHD_EGONE;
    return gone || (stopped && r == SHD_ECANCELED) ? SHD_OK : r;
}

static int export_to(const struct ask *ask, int dir_fd, struct shd_err *e)
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
        r = export_all(ask, m, dir_fd, e);
    shd_close(s);
    return r;
}

static int run(const struct ask *ask, struct shd_err *e)
{
    if (mkdir(ask->dir, 0777) != 0 && errno != EEXIST)
        return err_sys(e, SHD_EIO, "make directory '%.150s'", ask->dir);
    const int dir_fd = open(ask->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir_fd < 0)
        return err_sys(e, SHD_EIO, "open directory '%.150s'", ask->dir);
    signal(SIGXFSZ, SIG_IGN); /* a limit on file sizes is an error with a name */
    if (ask->follow) {
        signal(SIGINT, stop);
        signal(SIGTERM, stop);
    }
    const int r = export_to(ask, dir_fd, e);
    close(dir_fd);
    return r;
}

int verb_export(int argc, char **argv)
{
    struct ask ask = { .dir = NULL };
    struct shd_err e = { 0 };
    const struct flag table[] = {
        VERB_ADDRESS_FLAGS(ask.address),
        { "model", 'm', FLAG_STRING, "NAME", "which model (the only one there)", &ask.model, 0, 0 },
        { "follow", 'f', FLAG_BOOL, NULL, "stay, and write what comes", &ask.follow, 0, 0 },
        { "ema", 0, FLAG_BOOL, NULL, "the moving average of the parameters, where the spec has one",
          &ask.ema, 0, 0 },
        { "every", 0, FLAG_U32, "N", "only steps that are multiples of N (any)", &ask.every, 1,
          UINT32_MAX },
        { "keep", 0, FLAG_U32, "N", "remove files of steps before the last N (none)", &ask.keep, 1,
          UINT32_MAX },
        { "json", 'j', FLAG_BOOL, NULL, "one JSON object a line: name, model, step, bytes",
          &ask.json, 0, 0 },
    };
    const struct flags flags = VERB_FLAGS(export, "shardctl export DIR [FLAGS]", table);
    const char *more;
    const int code = verb_start_word(&flags, argc, argv, &ask.dir, &more);
    if (code >= 0)
        return code;
    if (more != NULL)
        return ctl_usage("one directory at a time, got '%s' as well", more);
    if (ask.dir == NULL)
        return ctl_usage("no directory: shardctl export DIR");
    return run(&ask, &e) == SHD_OK ? CTL_OK : ctl_fail("%s", e.text);
}
