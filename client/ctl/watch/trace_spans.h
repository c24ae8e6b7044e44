/* Sets of time, as lists of spans: united, measured, and compared. Times in microseconds. Pure. */
#ifndef SHD_CTL_TRACE_SPANS_H
#define SHD_CTL_TRACE_SPANS_H

#include <stddef.h>

struct span {
    double begin, end;
};
struct spans {
    struct span *items; /* owned */
    size_t count, capacity;
};

/* No-op for an empty or a senseless span, or without memory. */
void spans_add(struct spans *s, double begin, double end);
void spans_free(struct spans *s);

/* Sort, and join what overlaps. Before the next two. */
void spans_unite(struct spans *s);
double spans_sum(const struct spans *s);
double spans_common(const struct spans *a, const struct spans *b);

#endif
