/* See host_refill.h. */
#include "client/ctl/run/host_refill.h"

#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <unistd.h>

#include "client/ctl/base/child.h"

static int spawn(char *const *argv, const struct environ *env, struct shd_err *e)
{
    char **list = NULL;
    pid_t pid;
    int r = environ_list(env, &list, e);
    if (r != SHD_OK)
        return r;
    const int in = open("/dev/null", O_RDONLY | O_CLOEXEC);
    const struct child_spawn child = {
        .argv = argv, .envp = list, .in = in, .out = STDERR_FILENO, .err = STDERR_FILENO
    };
    r = in >= 0 ? child_spawn(&child, &pid, e) : err_sys(e, SHD_EIO, "open /dev/null");
    if (in >= 0)
        close(in);
    free(list);
    return r;
}

int host_refill_begin(const char *name, const char *runtime, const char *dir, struct shd_err *e)
{
    char self[PATH_MAX];
    struct environ env = { 0 };
    char *argv[] = { self,
                     (char[]){ "hosts" },
                     (char[]){ "--address" },
                     (char *)runtime,
                     (char[]){ "--in" },
                     (char *)name,
                     (char[]){ "--by" },
                     (char *)dir,
                     (char[]){ "--watch" },
                     NULL };
    int r = child_find_self(self, sizeof self, e);
    if (r == SHD_OK)
        r = environ_new(&env, e);
    if (r == SHD_OK)
        r = spawn(argv, &env, e);
    environ_free(&env);
    return r == SHD_OK ? r : err_prefix(e, "who fills this host");
}
