/* See tensor.h. */
#include "daemon/view/tensor.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>
#include <uv.h>

#include "daemon/base/state.h"
#include "daemon/core/step.h"
#include "daemon/model/model.h"
#include "daemon/model/show.h"
#include "daemon/view/view.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"
#include "proto/share/shardmap.h"
#include "proto/spec/spec.h"

#define RETRY_MS 5

enum tensor_state { TENSOR_IDLE, TENSOR_ASKED, TENSOR_COUNTED, TENSOR_ANSWERED };

struct tensor_view {
    struct daemon *daemon; /* borrowed */
    uv_timer_t retry;
    struct show *show;     /* owned: the loop's */
    uint64_t since_ns;     /* that the loop is at it */
    pthread_mutex_t mutex; /* guards the rest */
    enum tensor_state state;
    uint64_t number; /* of the question */
    struct tensor_question question;
    char *json; /* owned: the answer */
    size_t bytes;
    int status;
    struct shd_err why;
};

/* -- The HTTP thread's ---------------------------------------------------------------------------
 */

uint64_t tensor_ask(struct tensor_view *t, const struct tensor_question *question)
{
    uint64_t number = 0;
    pthread_mutex_lock(&t->mutex);
    if (t->state == TENSOR_IDLE || t->state == TENSOR_ANSWERED) { /* nobody came for that one */
        free(t->json);
        t->json = NULL;
        t->state = TENSOR_ASKED;
        t->question = *question;
        number = ++t->number;
    }
    pthread_mutex_unlock(&t->mutex);
    if (number != 0)
        uv_async_send(&t->daemon->view->async);
    return number;
}

bool tensor_answer(struct tensor_view *t, uint64_t number, char **ret_json, size_t *ret_bytes,
                   int *ret_status, struct shd_err *ret_why)
{
    pthread_mutex_lock(&t->mutex);
    const bool ours = t->number == number, done = !ours || t->state == TENSOR_ANSWERED;
    *ret_json = NULL;
    *ret_status = SHD_EBUSY;
    *ret_why = (struct shd_err){ SHD_EBUSY, "another tensor was asked for: ask again" };
    if (ours && done) {
        *ret_json = t->json;
        *ret_bytes = t->bytes;
        *ret_status = t->status;
        *ret_why = t->why;
        t->json = NULL;
        t->state = TENSOR_IDLE;
    }
    pthread_mutex_unlock(&t->mutex);
    return done;
}

/* -- The loop's ----------------------------------------------------------------------------------
 */

static json_t *real_or_null(double x)
{
    return isfinite(x) ? json_real(x) : json_null();
}

/* As the bytes lie, for who adds the owners' parts. */
static json_t *tally_hex(const struct tally *tally)
{
    static const char digits[] = "0123456789abcdef";
    const uint8_t *bytes = (const uint8_t *)tally;
    char *text = sys_malloc(2 * sizeof *tally + 1);
    if (text == NULL)
        return NULL;
    for (size_t i = 0; i < sizeof *tally; i++) {
        text[2 * i] = digits[bytes[i] >> 4];
        text[2 * i + 1] = digits[bytes[i] & 15];
    }
    text[2 * sizeof *tally] = '\0';
    json_t *hex = json_string_nocheck(text);
    free(text);
    return hex;
}

static json_t *answer_json(const struct tensor_question *q, const struct model *m,
                           const struct shown *shown)
{
    static const char *const names[] = { "param", "m", "v", "grad", "update", "ema" };
    const struct tally *t = &shown->tally;
    json_t *o = json_pack("{s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "model",
                          m->spec->name, "tensor", q->tensor, "array", names[q->array], "owner",
                          (json_int_t)m->map->owner, "owners", (json_int_t)m->map->owners, "step",
                          (json_int_t)shown->step, "updates", (json_int_t)shown->updates, "elems",
                          (json_int_t)t->elems, "zeros", (json_int_t)t->zeros, "nan",
                          (json_int_t)t->nans, "inf", (json_int_t)t->infs);
    if (o == NULL)
        return NULL;
    if (q->array == SHOW_GRAD) {
        json_object_set_new(o, "of_step", json_integer((json_int_t)shown->of_step));
        json_object_set_new(o, "groups", json_integer((json_int_t)shown->groups));
    }
    json_object_set_new(o, "min", real_or_null(t->min));
    json_object_set_new(o, "max", real_or_null(t->max));
    json_object_set_new(o, "mean", real_or_null(tally_mean(t)));
    json_object_set_new(o, "rms", real_or_null(tally_rms(t)));
    if (q->array == SHOW_UPDATE)
        json_object_set_new(o, "update_ratio", real_or_null(tally_ratio(t)));
    json_object_set_new(o, "tally", tally_hex(t));
    return o;
}

static void answer(struct tensor_view *t, char *json, int status, const struct shd_err *why)
{
    const uint64_t one = 1;
    pthread_mutex_lock(&t->mutex);
    t->json = json;
    t->bytes = json != NULL ? strlen(json) : 0;
    t->status = status;
    t->why = *why;
    t->state = TENSOR_ANSWERED;
    pthread_mutex_unlock(&t->mutex);
    const ssize_t written = write(t->daemon->view->event_fd, &one, sizeof one);
    CHECK(written == (ssize_t)sizeof one || errno == EAGAIN);
}

static void tried(uv_timer_t *timer);

/* SHD_ESTEP, SHD_EBUSY: the model was quicker. */
static void over(void *ctx, int status, const struct shd_err *e)
{
    struct tensor_view *t = ctx;
    struct shd_err why = e != NULL ? *e : (struct shd_err){ 0 };
    char *json = NULL;
    const struct model *m = model_find(t->daemon, t->question.model);
    const bool late = uv_hrtime() - t->since_ns > TENSOR_WAIT_MS * NS_PER_MS;
    if ((status == SHD_ESTEP || status == SHD_EBUSY) && !late) {
        free(t->show);
        t->show = NULL;
        uv_timer_start(&t->retry, tried, RETRY_MS, /* repeat= */ 0);
        return;
    }
    if (m == NULL && status == SHD_OK)
        status = err_set(&why, SHD_ENOENT, "model '%.100s' was dropped", t->question.model);
    if (status == SHD_OK && m != NULL) {
        json_t *o = answer_json(&t->question, m, shown_of(t->show));
        json = o != NULL ? json_dumps(o, JSON_COMPACT) : NULL;
        json_decref(o);
        if (json == NULL)
            status = err_set(&why, SHD_ENOMEM, "out of memory");
    }
    free(t->show);
    t->show = NULL;
    answer(t, json, status, &why);
}

static int begin(struct tensor_view *t, struct shd_err *e)
{
    const struct tensor_question *q = &t->question; /* nobody writes it while it is ours */
    struct model *m = model_find(t->daemon, q->model);
    uint32_t tensor;
    if (m == NULL || !m->ready)
        return err_set(e, SHD_ENOENT, "no open model '%.100s' here", q->model);
    if (!spec_find_tensor(m->spec, q->tensor, &tensor))
        return err_set(e, SHD_ENOENT, "model '%.60s' has no tensor '%.100s'", m->spec->name,
                       q->tensor);
    const struct show_ask ask = {
        .model = m, .tensor = tensor, .array = q->array, .elems = m->spec->tensors[tensor].elems
    };
    const struct show_done done = { over, t };
    return show_begin(&ask, &done, &t->show, e);
}

static void attempt(struct tensor_view *t)
{
    struct shd_err e = { 0 };
    const int r = begin(t, &e);
    if (r != SHD_PENDING)
        over(t, r, &e);
}

static void tried(uv_timer_t *timer)
{
    struct tensor_view *t = timer->data;
    attempt(t);
}

void tensor_serve(struct tensor_view *t)
{
    pthread_mutex_lock(&t->mutex);
    const bool asked = t->state == TENSOR_ASKED;
    if (asked)
        t->state = TENSOR_COUNTED;
    pthread_mutex_unlock(&t->mutex);
    if (!asked)
        return;
    t->since_ns = uv_hrtime();
    attempt(t);
}

int tensor_view_new(struct daemon *d, struct tensor_view **ret_view, struct shd_err *e)
{
    struct tensor_view *t = sys_calloc(1, sizeof *t);
    if (t == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for the view");
    t->daemon = d;
    pthread_mutex_init(&t->mutex, NULL);
    uv_timer_init(d->loop, &t->retry);
    t->retry.data = t;
    *ret_view = t;
    return SHD_OK;
}

void tensor_view_free(struct tensor_view *t)
{
    if (t == NULL)
        return;
    free(t->show);
    free(t->json);
    pthread_mutex_destroy(&t->mutex);
    free(t);
}
