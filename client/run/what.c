/* Which tensor an address belongs to, and a SIGSEGV that says it. See client/shd.h.
 *
 * Parameters are mapped read-only, which a program's other libraries may not know: PyTorch has no
 * tensors that cannot be written to. What runs in the handler reads pointers and writes to stderr.
 */
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "client/paths/path.h"
#include "client/run/fork.h"
#include "client/session/session.h"
#include "proto/base/dtype.h"

/* -- Looking it up ----------------------------------------------------------------------------- */

/* The tensor at an element of a unit, or in the gap behind it. */
static void find_tensor(const struct shd_model *m, uint32_t unit, uint64_t elem,
                        struct shd_tensor *ret_tensor, uint64_t *ret_elem)
{
    const struct spec_unit *u = &m->spec->units[unit];
    for (uint32_t i = u->first_tensor; i < u->first_tensor + u->tensor_count; i++) {
        const struct spec_tensor *t = &m->spec->tensors[i];
        if (t->offset_elems <= elem) {
            *ret_tensor = model_tensor(m, i);
            *ret_elem = elem - t->offset_elems;
        }
    }
}

static bool find_in_model(const struct shd_model *m, uintptr_t at, struct shd_tensor *ret_tensor,
                          uint64_t *ret_elem)
{
    const uint64_t elem_bytes = dtype_bytes(m->spec->publish);
    if (m->reader->kind != SHD_PATH_MAP) /* the program's own memory, and used in turns */
        return false;
    for (uint32_t u = 0; u < m->spec->unit_count; u++) {
        const uintptr_t base = (uintptr_t)m->reader->params(m, u);
        if (base == 0 || at < base || at - base >= m->spec->units[u].elems * elem_bytes)
            continue;
        find_tensor(m, u, (at - base) / elem_bytes, ret_tensor, ret_elem);
        return true;
    }
    return false;
}

shd_model *shd_what(const void *address, struct shd_tensor *ret_tensor, uint64_t *ret_elem)
{
    struct shd_tensor tensor;
    for (const struct shd_session *s = fork_sessions(); s != NULL; s = s->next)
        for (struct shd_model *m = s->models; m != NULL; m = m->next)
            if (find_in_model(m, (uintptr_t)address, &tensor, ret_elem)) {
                if (sized_check(ret_tensor, sizeof tensor, "shd_tensor", /* e= */ NULL) == SHD_OK)
                    sized_give(ret_tensor, &tensor);
                return m;
            }
    return NULL;
}

/* -- Saying it --------------------------------------------------------------------------------- */

static struct sigaction before; /* what was installed for SIGSEGV */
static volatile sig_atomic_t passed_on;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void say(const char *text)
{
    const ssize_t written = write(STDERR_FILENO, text, strlen(text));
    (void)written; /* there is nowhere else to say it */
}

static void say_number(uint64_t number)
{
    char digits[24];
    size_t at = sizeof digits - 1;
    digits[at] = '\0';
    do {
        digits[--at] = (char)('0' + number % 10);
        number /= 10;
    } while (number > 0);
    say(&digits[at]);
}

static void on_fault(int signal_number, siginfo_t *info, void *context)
{
    struct shd_tensor tensor = { .size = sizeof tensor, .name = "" };
    uint64_t elem = 0;
    const bool by_kernel = info->si_code > 0;
    const shd_model *m = by_kernel ? shd_what(info->si_addr, &tensor, &elem) : NULL;
    (void)context;
    if (m != NULL) {
        say("libshd: write to tensor '");
        say(tensor.name);
        say("' of model '");
        say(m->spec->name);
        say("', element ");
        say_number(elem);
        say(": parameters are their owners' memory, which only a step and shd_put() change; write "
            "to a copy\n");
    }
    /* As without this: the instruction faults again, and what was installed before sees it. That
     * may pass it on to what was there before, which is this handler where it was on top once. */
    const struct sigaction end = { .sa_handler = SIG_DFL };
    sigaction(signal_number, passed_on ? &end : &before, NULL);
    passed_on = 1;
    if (!by_kernel)
        raise(signal_number);
}

int shd_explain_writes(struct shd_err *e)
{
    struct sigaction explain = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK };
    struct sigaction today;
    sigemptyset(&explain.sa_mask);
    pthread_mutex_lock(&lock);
    int r = sigaction(SIGSEGV, NULL, &today);
    if (r == 0 && today.sa_sigaction != on_fault) {
        before = today; /* before the handler can run */
        r = sigaction(SIGSEGV, &explain, NULL);
    }
    pthread_mutex_unlock(&lock);
    return r == 0 ? SHD_OK : err_set(e, SHD_EIO, "SIGSEGV cannot be handled");
}
