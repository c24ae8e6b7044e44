/* See resume.h. */
#include "client/ctl/run/resume.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <unistd.h>

#include "client/checkpoint/dir.h"
#include "client/ctl/base/say.h"
#include "client/ctl/run/run_state.h"
#include "proto/files/ckpt.h"
#include "proto/files/ckpt_info.h"

/* A directory without checkpoints, or none at all, is a first start. */
static int find_latest(const char *dir, char **ret_path, struct shd_err *e)
{
    *ret_path = NULL;
    const int r = checkpoint_dir_resolve(dir, ret_path, e);
    if (r != SHD_ENOENT)
        return r;
    ctl_say("nothing to resume in %s: starting fresh", dir);
    return SHD_OK;
}

/* The step a restore of path begins with. */
static int step_of(const char *path, uint64_t *ret_step, struct shd_err *e)
{
    struct ckpt_info info;
    char *found = NULL;
    int fd = -1;
    int r = checkpoint_dir_resolve(path, &found, e);
    if (r != SHD_OK)
        return r;
    r = ckpt_open_dir(found, &fd, e);
    if (r == SHD_OK)
        r = ckpt_info_read(fd, &info, e);
    if (r == SHD_OK) {
        *ret_step = info.step;
        ckpt_info_deinit(&info);
    } else {
        err_prefix(e, "%.120s", found);
    }
    if (fd >= 0)
        close(fd);
    free(found);
    return r;
}

static int check_directory(const char *dir, uint64_t step, struct shd_err *e)
{
    const int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) /* it is made when it is not there; what else is wrong its saver says */
        return SHD_OK;
    const int r = checkpoint_dir_check_begin(fd, dir, step, e);
    close(fd);
    return r;
}

int resume_plan(struct run_options *options, const char *dir, char **ret_path, struct shd_err *e)
{
    uint64_t step = 0;
    int r = SHD_OK;
    *ret_path = NULL;
    if (dir != NULL) {
        options->checkpoint = dir;
        r = find_latest(dir, ret_path, e);
        options->restore = *ret_path;
    }
    if (r != SHD_OK || options->checkpoint == NULL)
        return r;
    if (options->restore != NULL)
        r = step_of(options->restore, &step, e);
    if (r == SHD_OK && dir != NULL && options->restore != NULL)
        ctl_say("resuming from %s (step %" PRIu64 ")", options->restore, step);
    return r == SHD_OK ? check_directory(options->checkpoint, step, e) : r;
}
