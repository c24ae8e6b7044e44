/* Work that Ctrl-C and SIGTERM end at once, wherever it waits: a connect, a daemon that is stopped,
 * a disk.
 *
 * It is done in a child of ours. A signal kills the child, and then daemons see its sessions end:
 * they break off what they save and take a drain back, as for any client that dies. What it leaves
 * on disk, we remove. SIGKILL to us ends the child as well, and then the next saver removes it.
 */
#ifndef SHD_CTL_GUARD_H
#define SHD_CTL_GUARD_H

#include <stdbool.h>

struct guarded {
    int (*work)(void *arg); /* in the child; returns the exit code */
    void *arg;              /* its, a copy of ours */
    /* A handler: a first SIGTERM is the work's own affair, also one that comes before the work
     * begins. A second one ends it, and with NULL the first. */
    void (*on_term)(int sig);
    const char *dir;    /* borrowed: where it saves, or NULL; partial checkpoints go */
    const char *broken; /* what to say when it was ended: "nothing was saved" */
};

/* Do it. Returns the exit code: the work's, or 128 + N for signal N. */
int guard_run(const struct guarded *g);

#endif
