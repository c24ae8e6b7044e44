/* Taking a snapshot, and letting go of one: the loop thread copies numbers, nothing is formatted
 * here. */
#ifndef SHD_TAKE_H
#define SHD_TAKE_H

#include <stdbool.h>

struct daemon;
struct view_snapshot;

#define VIEW_SPAN_SESSIONS_MAX 256u /* whose spans a trace has: 32 KiB each */

/* NULL: no memory. */
struct view_snapshot *view_take(struct daemon *d, bool with_spans);
void view_unref(struct view_snapshot *s); /* any thread; NULL is a no-op */

#endif
