/* See idle.h. */
#include "client/session/idle.h"

#include <stddef.h>

bool idle_stops(struct idle *idle)
{
    if (idle->fn == NULL || idle->stops)
        return idle->stops;
    const uint64_t now_ns = clock_now_ns();
    if (idle->asked_ns != 0 && now_ns - idle->asked_ns < IDLE_NS)
        return false;
    idle->asked_ns = now_ns;
    idle->stops = idle->fn(idle->ctx) != 0;
    return idle->stops;
}

uint64_t idle_sleep_ns(const struct idle *idle, uint64_t sleep_ns)
{
    return idle->fn != NULL && sleep_ns > IDLE_NS ? IDLE_NS : sleep_ns;
}

int idle_take(struct idle *idle, struct shd_err *e)
{
    if (!idle->stops)
        return SHD_OK;
    idle->stops = false;
    return err_set(e, SHD_ECANCELED, "broken off: shd_options.idle said so");
}
