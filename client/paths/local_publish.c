/* See local_publish.h. */
#include "client/paths/local_publish.h"

#include "client/paths/kern_run.h"
#include "client/paths/local_state.h"
#include "kernels/cpu/decode.h"

int local_publish(struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    static const uint64_t first = 0;
    const struct local_unit *u = &m->local->units[unit];
    const uint64_t elems = m->spec->units[unit].elems;
    const struct kern_cast cast = { u->publish, m->spec->publish, u->param, elems };
    const struct kern_encode encode = { .in = u->param,
                                        .out = u->codes,
                                        .codec = m->spec->codec,
                                        .elems = elems,
                                        .first_of = &first,
                                        .bytes_of = &first,
                                        .slices = 1 };
    const struct kern_decode decode = { u->publish, u->codes, m->spec->codec, m->spec->publish,
                                        elems };
    if (u->codes == NULL)
        return kern_run_op(m->session->kern, &(struct kern_op){ KERN_CAST, { .cast = cast } }, e);
    const int r = kern_run_op(m->session->kern,
                              &(struct kern_op){ KERN_ENCODE, { .encode = encode } }, e);
    if (r == SHD_OK)
        cpu_decode(&decode);
    return r;
}
