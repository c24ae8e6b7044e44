/* See room.h. */
#include "client/ctl/run/room.h"

#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "client/checkpoint/dir.h"
#include "client/ctl/base/text.h"
#include "proto/files/ckpt.h"

#define PROBE_BYTES ((size_t)64 * 1024)

static int write_some(const struct checkpoint_dir *d, struct shd_err *e)
{
    static const char zeros[PROBE_BYTES];
    int fd = -1;
    int r = checkpoint_create(d->partial_fd, "probe", PROBE_BYTES, (uid_t)-1, &fd, e);
    if (r != SHD_OK)
        return r;
    r = ckpt_pwrite(fd, zeros, PROBE_BYTES, 0, "probe", e);
    if (r == SHD_OK && fsync(fd) != 0)
        r = err_sys(e, SHD_EIO, "sync 'probe'");
    close(fd);
    return r;
}

int room_probe(const struct run_options *options, struct shd_err *e)
{
    struct checkpoint_dir d;
    if (options->checkpoint == NULL)
        return SHD_OK;
    int r = checkpoint_dir_lock(&d, options->checkpoint, (uid_t)-1, e);
    if (r == SHD_OK)
        r = checkpoint_dir_begin(&d, e);
    if (r == SHD_OK)
        r = write_some(&d, e);
    checkpoint_dir_close(&d);
    return r == SHD_OK
               ? r
               : err_prefix(e, "cannot save in '%.100s' (--checkpoint)", options->checkpoint);
}

/* True for the name of a model's part, as daemons give it to what they store. */
static bool is_part(const char *name, const char *part)
{
    const size_t bytes = strlen(name), end = strlen(part);
    return bytes > end && strcmp(name + bytes - end, part) == 0;
}

/* The bytes of the state segments that are kept; *ret_models: the most that one daemon has. */
static uint64_t state_bytes(const struct run *r, uint32_t *ret_models)
{
    uint64_t bytes = 0;
    *ret_models = 0;
    for (uint32_t i = 0; i < r->daemons.count; i++) {
        const struct kept *k = &r->daemons.list[i].kept;
        uint32_t models = 0;
        for (uint32_t n = 0; n < k->count; n++) {
            struct stat st;
            models += is_part(k->names[n], "-ledger");
            if (is_part(k->names[n], "-state") && fstat(k->fds[n], &st) == 0 && st.st_size > 0)
                bytes += (uint64_t)st.st_size;
        }
        *ret_models = models > *ret_models ? models : *ret_models;
    }
    return bytes;
}

/* State is parameters, moments and gradient sums; a checkpoint has all but the sums, which are half
 * of it at most. */
int room_check(struct run *r, const char *name, struct shd_err *e)
{
    const char *dir = r->options->checkpoint;
    struct statvfs fs;
    uint32_t models;
    char needed[TEXT_BYTES], there[TEXT_BYTES];
    if (name == NULL || (!is_part(name, "-state") && !is_part(name, "-ledger")))
        return SHD_OK;
    if (dir == NULL || r->phase > RUN_WORKING || statvfs(dir, &fs) != 0)
        return SHD_OK;
    const uint64_t state = state_bytes(r, &models), free = (uint64_t)fs.f_bavail * fs.f_frsize;
    if (models != 1 || free >= state)
        return SHD_OK;
    text_size(free, there);
    if (free < state / 2)
        return err_set(e, SHD_ENOMEM,
                       "no room for a checkpoint in '%.100s' (--checkpoint): it needs more than "
                       "%s, there are %s free",
                       dir, text_size(state / 2, needed), there);
    if (!r->save.room_said)
        ctl_say("there may be no room for a checkpoint in '%s': the model's state is %s, there are "
                "%s free",
                dir, text_size(state, needed), there);
    r->save.room_said = true;
    return SHD_OK;
}
