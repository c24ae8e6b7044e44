/* What a daemon stored with us, its service manager, and gets back when it is started again: open
 * files by name, as systemd's fd store has them (sd_notify(3), FDSTORE=1).
 *
 * Several may have one name; removing a name removes all of them. The same file stored again under
 * the same name counts once, so that a daemon may store what it was handed back. All limits are
 * per daemon. FDPOLL is taken as 0: nothing is removed but by the daemon.
 */
#ifndef SHD_CTL_KEEPER_H
#define SHD_CTL_KEEPER_H

#include <stddef.h>
#include <stdint.h>

#include "client/ctl/run/notify.h"
#include "proto/base/status.h"

#define KEPT_FDS_MAX        4096u
#define KEPT_NAME_BYTES_MAX 255u
/* All names with their separators: they travel in one environment variable, which Linux limits to
 * 128 KiB. */
#define KEPT_NAMES_BYTES_MAX (127u * 1024u)

struct kept {
    int *fds;     /* owned, [count], each owned */
    char **names; /* owned, [count], each owned */
    uint32_t count, room;
    size_t names_bytes;
};

/* Do what a message of the daemon asks: keep its descriptors or drop a name. What is refused is
 * said on stderr, naming the daemon, and closed with the message. */
void keeper_take(struct kept *kept, struct notify_message *message, const char *daemon);

/* The names in order, separated by ':'. *ret_names is the caller's to free. Errors: SHD_ENOMEM. */
int keeper_names(const struct kept *kept, char **ret_names, struct shd_err *e);

/* Close all; leaves it empty. */
void keeper_free(struct kept *kept);

#endif
