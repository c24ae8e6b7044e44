/* See activity.h. */
#include "proto/share/activity.h"

#include <stddef.h>

#include "proto/base/clock.h"

#define READ_TRIES   8
#define UNIT_SHIFT   24
#define WHAT_SHIFT   48
#define PLACE_MASK   UINT64_C(0xffffff)
#define SUM_NS_MAX   (UINT64_C(1) << 62)
#define COUNT_MAX    (UINT64_C(1) << 48)
#define DURATION_MAX (UINT64_C(1) << 50) /* 13 days */
#define STEP_MAX     (UINT64_C(1) << 53) /* JSON's numbers end here */
#define SLOT_UNSAID  0                   /* activity.slot_wait; what is above is a time */
#define SLOT_NO_WAIT 1

const uint64_t activity_bounds_ns[ACTIVITY_BUCKETS] = {
    50 * NS_PER_US,  100 * NS_PER_US, 200 * NS_PER_US, 500 * NS_PER_US, NS_PER_MS,
    2 * NS_PER_MS,   5 * NS_PER_MS,   10 * NS_PER_MS,  20 * NS_PER_MS,  50 * NS_PER_MS,
    100 * NS_PER_MS, 200 * NS_PER_MS, 500 * NS_PER_MS, NS_PER_S,        2 * NS_PER_S,
    5 * NS_PER_S,    10 * NS_PER_S,   20 * NS_PER_S,   50 * NS_PER_S,   100 * NS_PER_S,
};

const char *activity_name(enum activity_what what)
{
    static const char *const names[ACTIVITY_WHATS] = {
        [ACTIVITY_FORWARD] = "forward",     [ACTIVITY_BACKWARD] = "backward",
        [ACTIVITY_WAIT_UNIT] = "wait unit", [ACTIVITY_WAIT_SLOT] = "wait slot",
        [ACTIVITY_RETURN] = "return",       [ACTIVITY_PREPARE] = "prepare",
        [ACTIVITY_COMMIT] = "commit",       [ACTIVITY_LEASE] = "lease",
        [ACTIVITY_RECONNECT] = "reconnect", [ACTIVITY_IDLE] = "idle",
    };
    return (unsigned)what < ACTIVITY_WHATS ? names[what] : NULL;
}

/* -- The worker: plain stores on x86-64; the order is what counts -------------------------------
 */

/* Release: a reader that sees this store sees the odd number too, which was stored before. */
static void put(_Atomic uint64_t *word, uint64_t value)
{
    atomic_store_explicit(word, value, memory_order_release);
}

/* Acquire: these loads come before that of the number that is read last. */
static uint64_t get(const _Atomic uint64_t *word)
{
    return atomic_load_explicit(word, memory_order_acquire);
}

static void put_words(struct activity_words *w, const struct activity_span *s)
{
    put(&w->begin_ns, s->begin_ns);
    put(&w->duration_ns, s->duration_ns);
    put(&w->place, (uint64_t)s->what << WHAT_SHIFT | (s->unit & PLACE_MASK) << UNIT_SHIFT |
                       (s->micro & PLACE_MASK));
    put(&w->step, s->step);
}

void activity_init(struct activity *a, enum activity_path path)
{
    put(&a->path, path);
    put(&a->magic, ACTIVITY_MAGIC);
}

/* The number is odd while a span is written: readers compare it before and after. */
void activity_set_now(struct activity *a, const struct activity_span *now)
{
    const uint64_t seq = get(&a->now_seq) | 1;
    put(&a->now_seq, seq);
    put_words(&a->now, now);
    put(&a->now_seq, seq + 1);
}

void activity_add_span(struct activity *a, const struct activity_span *span)
{
    const uint64_t spans = get(&a->spans);
    put_words(&a->ring[spans % ACTIVITY_SPANS], span);
    put(&a->spans, spans + 1);
}

void activity_add_wait(struct activity *a, uint64_t duration_ns)
{
    uint32_t i = 0;
    while (i < ACTIVITY_BUCKETS && duration_ns > activity_bounds_ns[i])
        i++;
    put(&a->bucket[i], get(&a->bucket[i]) + 1);
    put(&a->sum_ns, get(&a->sum_ns) + duration_ns);
}

void activity_set_slot_wait(struct activity *a, uint64_t since_ns)
{
    put(&a->slot_wait, since_ns > SLOT_NO_WAIT ? since_ns : SLOT_NO_WAIT);
}

/* -- The daemon ---------------------------------------------------------------------------------
 */

static struct activity_span get_words(const struct activity_words *w)
{
    const uint64_t place = get(&w->place);
    const uint64_t what = place >> WHAT_SHIFT;
    return (struct activity_span){
        .what = what < ACTIVITY_WHATS ? (enum activity_what)what : ACTIVITY_SILENT,
        .unit = (uint32_t)(place >> UNIT_SHIFT & PLACE_MASK),
        .micro = (uint32_t)(place & PLACE_MASK),
        .step = get(&w->step),
        .begin_ns = get(&w->begin_ns),
        .duration_ns = get(&w->duration_ns),
    };
}

static bool is_possible(const struct activity_span *s, const struct activity_limits *limits)
{
    return s->what != ACTIVITY_SILENT && (s->unit < limits->units || s->unit == ACTIVITY_NONE) &&
           (s->micro < limits->micros || s->micro == ACTIVITY_NONE) && s->step < STEP_MAX &&
           s->begin_ns <= limits->now_ns && s->duration_ns <= DURATION_MAX;
}

static bool is_page(const struct activity *a)
{
    return get(&a->magic) == ACTIVITY_MAGIC;
}

const char *activity_path_name(const struct activity *a)
{
    static const char *const names[ACTIVITY_PATHS] = {
        [ACTIVITY_PATH_MAP] = "map",
        [ACTIVITY_PATH_COPY] = "copy",
        [ACTIVITY_PATH_NCCL] = "nccl",
    };
    const uint64_t path = is_page(a) ? get(&a->path) : ACTIVITY_PATH_NONE;
    return path < ACTIVITY_PATHS ? names[path] : NULL;
}

bool activity_now(const struct activity *a, const struct activity_limits *limits,
                  struct activity_span *ret_now)
{
    for (int i = 0; i < READ_TRIES && is_page(a); i++) {
        const uint64_t before = get(&a->now_seq);
        const struct activity_span now = get_words(&a->now);
        if (before % 2 != 0 || get(&a->now_seq) != before)
            continue;
        if (!is_possible(&now, limits))
            return false;
        *ret_now = now;
        return true;
    }
    return false;
}

bool activity_waits(const struct activity *a, struct activity_waits *ret_waits)
{
    struct activity_waits waits;
    if (!is_page(a))
        return false;
    for (uint32_t i = 0; i <= ACTIVITY_BUCKETS; i++) {
        waits.bucket[i] = get(&a->bucket[i]);
        if (waits.bucket[i] > COUNT_MAX)
            return false;
    }
    waits.sum_ns = get(&a->sum_ns);
    if (waits.sum_ns > SUM_NS_MAX)
        return false;
    *ret_waits = waits;
    return true;
}

bool activity_slot_wait(const struct activity *a, uint64_t now_ns, uint64_t *ret_since_ns)
{
    const uint64_t word = get(&a->slot_wait);
    if (word == SLOT_UNSAID)
        return false;
    *ret_since_ns = word == SLOT_NO_WAIT || word > now_ns ? 0 : word;
    return true;
}

uint32_t activity_spans(const struct activity *a, const struct activity_limits *limits,
                        uint64_t since_ns, struct activity_span ret_spans[ACTIVITY_SPANS])
{
    if (!is_page(a))
        return 0;
    const uint64_t end = get(&a->spans);
    const uint64_t first = end > ACTIVITY_SPANS ? end - ACTIVITY_SPANS : 0;
    for (uint64_t i = first; i < end; i++)
        ret_spans[i - first] = get_words(&a->ring[i % ACTIVITY_SPANS]);
    /* Spans that were written over during the copy are dropped; the one that is being written is
     * not counted yet, but may have been spoiled. */
    const uint64_t later = get(&a->spans);
    const uint64_t kept_from = later + 1 > ACTIVITY_SPANS ? later + 1 - ACTIVITY_SPANS : 0;
    uint32_t count = 0;
    if (later < end || end - first > ACTIVITY_SPANS)
        return 0; /* it goes backwards: nonsense */
    for (uint64_t i = first > kept_from ? first : kept_from; i < end; i++) {
        const struct activity_span s = ret_spans[i - first];
        if (is_possible(&s, limits) && s.begin_ns + s.duration_ns >= since_ns)
            ret_spans[count++] = s;
    }
    return count;
}
