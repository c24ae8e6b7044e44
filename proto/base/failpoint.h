/* Fail points: named places, before and after each durable action, where a test can kill.
 *
 * Compiled in with SHD_FAIL_POINTS only (presets dev and tsan, and tests that compile the core
 * themselves); otherwise nothing is left of them. A process takes its orders from
 *
 *     SHARDD_FAIL=NAME[@N][!][,...]    SIGKILL itself at the N-th passage (1) of NAME; !: SIGSTOP
 *
 * read once. A simulator sets fail_point_hook instead and decides for itself.
 * `SHARDD_FAIL=list` prints each name on stderr when it is first passed.
 */
#ifndef SHD_FAILPOINT_H
#define SHD_FAILPOINT_H

#ifdef SHD_FAIL_POINTS
extern void (*fail_point_hook)(const char *name); /* NULL: SHARDD_FAIL counts */
void fail_point_hit(const char *name);
#define FAIL_POINT(name) fail_point_hit(name)
#else
#define FAIL_POINT(name) ((void)0)
#endif

#endif
