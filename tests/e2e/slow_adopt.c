/* For shardd's LD_PRELOAD: an adoption that takes long. Each time the daemon tells its manager how
 * far it has come it sleeps SLOW_ADOPT_MS afterwards; with SLOW_ADOPT_SILENT=1 the manager is not
 * told. */
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

__attribute__((visibility("default"))) int sd_notifyf(int unset_environment, const char *format,
                                                      ...);

int sd_notifyf(int unset_environment, const char *format, ...)
{
    char text[1024];
    int (*notify)(int, const char *);
    va_list ap;
    va_start(ap, format);
    vsnprintf(text, sizeof text, format, ap);
    va_end(ap);
    *(void **)&notify = dlsym(RTLD_NEXT, "sd_notify");
    if (strncmp(text, "EXTEND_TIMEOUT_USEC=", 20) != 0)
        return notify(unset_environment, text);
    const char *ms = getenv("SLOW_ADOPT_MS");
    const int r = getenv("SLOW_ADOPT_SILENT") != NULL ? 1 : notify(unset_environment, text);
    usleep((useconds_t)(ms != NULL ? atoi(ms) : 0) * 1000);
    return r;
}
