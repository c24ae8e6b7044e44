/* See session.h. */
#include "client/session/session.h"

#include "kernels/cpu/cpu.h"
#include "kernels/kern.h"
#include "proto/base/check.h"

int session_kern(struct shd_session *s, uint32_t threads, struct shd_err *e)
{
    const struct kern_config config = { .threads = threads };
    return s->kern != NULL ? SHD_OK : kern_cpu_new(&config, &s->kern, e);
}

struct kern *session_gpu(const struct shd_session *s)
{
    return s->on_gpu ? s->kern : NULL;
}

void session_live(struct shd_session *s, uint64_t bytes, bool more)
{
    if (more) {
        s->live_bytes += bytes;
        if (s->live_bytes > s->live_bytes_max)
            s->live_bytes_max = s->live_bytes;
    } else {
        CHECK(s->live_bytes >= bytes);
        s->live_bytes -= bytes;
    }
}
