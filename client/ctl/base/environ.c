#include "client/ctl/base/environ.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/base/check.h"

static const char *const manager_vars[] = { "NOTIFY_SOCKET",  "LISTEN_FDS",    "LISTEN_PID",
                                            "LISTEN_FDNAMES", "WATCHDOG_USEC", "WATCHDOG_PID" };

static bool var_is(const char *var, const char *name)
{
    const size_t bytes = strlen(name);
    return strncmp(var, name, bytes) == 0 && var[bytes] == '=';
}

static bool var_is_managers(const char *var)
{
    for (size_t i = 0; i < ARRAY_SIZE(manager_vars); i++)
        if (var_is(var, manager_vars[i]))
            return true;
    return false;
}

/* Takes var over, also on failure. */
static int environ_add(struct environ *env, char *var, struct shd_err *e)
{
    char **vars = var == NULL ? NULL : realloc(env->vars, (env->count + 2) * sizeof(*vars));
    if (vars == NULL) {
        free(var);
        return err_set(e, SHD_ENOMEM, "out of memory for environment variable %zu", env->count);
    }
    vars[env->count++] = var;
    vars[env->count] = NULL;
    env->vars = vars;
    return SHD_OK;
}

int environ_new(struct environ *ret_env, struct shd_err *e)
{
    struct environ env = { 0 };
    for (char **v = environ; *v != NULL; v++) {
        const int r = var_is_managers(*v) ? SHD_OK : environ_add(&env, strdup(*v), e);
        if (r != SHD_OK) {
            environ_free(&env);
            return r;
        }
    }
    *ret_env = env;
    return SHD_OK;
}

void environ_free(struct environ *env)
{
    for (size_t i = 0; i < env->count; i++)
        free(env->vars[i]);
    free(env->vars);
    *env = (struct environ){ 0 };
}

char *environ_value(const struct environ *env, const char *name)
{
    for (size_t i = 0; i < env->count; i++)
        if (var_is(env->vars[i], name))
            return env->vars[i] + strlen(name) + 1;
    return NULL;
}

bool environ_has(const struct environ *env, const char *name)
{
    return environ_value(env, name) != NULL;
}

void environ_unset(struct environ *env, const char *name)
{
    for (size_t i = 0; i < env->count; i++) {
        if (!var_is(env->vars[i], name))
            continue;
        free(env->vars[i]);
        memmove(env->vars + i, env->vars + i + 1, (env->count - i) * sizeof(*env->vars));
        env->count--;
        return;
    }
}

int environ_set(struct environ *env, struct shd_err *e, const char *name, const char *fmt, ...)
{
    char *value = NULL, *var = NULL;
    va_list args;
    va_start(args, fmt);
    const int n = vasprintf(&value, fmt, args);
    va_end(args);
    if (n < 0)
        value = NULL;
    if (value == NULL || asprintf(&var, "%s=%s", name, value) < 0)
        var = NULL;
    free(value);
    if (var == NULL)
        return err_set(e, SHD_ENOMEM, "out of memory for environment variable %s", name);
    for (size_t i = 0; i < env->count; i++) {
        if (!var_is(env->vars[i], name))
            continue;
        free(env->vars[i]);
        env->vars[i] = var;
        return SHD_OK;
    }
    return environ_add(env, var, e);
}
