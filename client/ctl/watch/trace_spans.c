/* See trace_spans.h. */
#include "client/ctl/watch/trace_spans.h"

#include <math.h>
#include <stdlib.h>

void spans_add(struct spans *s, double begin, double end)
{
    if (!isfinite(begin) || !isfinite(end) || end <= begin)
        return;
    if (s->count == s->capacity) {
        const size_t capacity = s->capacity * 2 + 64;
        struct span *grown = realloc(s->items, capacity * sizeof(*grown));
        if (grown == NULL)
            return;
        s->items = grown;
        s->capacity = capacity;
    }
    s->items[s->count++] = (struct span){ begin, end };
}

void spans_free(struct spans *s)
{
    free(s->items);
    *s = (struct spans){ 0 };
}

static int compare(const void *a, const void *b)
{
    const double x = ((const struct span *)a)->begin, y = ((const struct span *)b)->begin;
    return x < y ? -1 : x > y;
}

void spans_unite(struct spans *s)
{
    size_t to = 0;
    if (s->count < 2)
        return;
    qsort(s->items, s->count, sizeof(*s->items), compare);
    for (size_t i = 1; i < s->count; i++) {
        if (s->items[i].begin > s->items[to].end)
            s->items[++to] = s->items[i];
        else if (s->items[i].end > s->items[to].end)
            s->items[to].end = s->items[i].end;
    }
    s->count = to + 1;
}

double spans_sum(const struct spans *s)
{
    double sum = 0;
    for (size_t i = 0; i < s->count; i++)
        sum += s->items[i].end - s->items[i].begin;
    return sum;
}

double spans_common(const struct spans *a, const struct spans *b)
{
    double sum = 0;
    for (size_t i = 0, k = 0; i < a->count && k < b->count;) {
        const double begin = fmax(a->items[i].begin, b->items[k].begin);
        const double end = fmin(a->items[i].end, b->items[k].end);
        sum += end > begin ? end - begin : 0;
        if (a->items[i].end < b->items[k].end)
            i++;
        else
            k++;
    }
    return sum;
}
