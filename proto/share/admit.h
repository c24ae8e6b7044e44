/* Admission at a side channel. The kernel says who the peer is (SO_PEERCRED, SO_PEERGROUPS); the
 * runtime directory, which only its owner and root can change, says who is welcome.
 *
 *   daemon admits a client: its own uid, root, or a member of the directory's group if the
 *                           directory lets that group in (r-x, as 0750 does)
 *   client admits a daemon: its own uid, root, or the directory's owner if nobody else can put a
 *                           socket there (not writable for group and others)
 *
 * So one `chgrp` and `chmod` of the directory opens a daemon to a group, and nothing else does.
 */
#ifndef SHD_ADMIT_H
#define SHD_ADMIT_H

#include "proto/share/fdpass.h"

/* fd: the accepted socket; dir: the runtime directory. SHD_EAUTH names both sides; SHD_EIO,
 * SHD_ENOMEM: the peer's groups cannot be read. */
int admit_client(int fd, const struct side_peer *peer, const char *dir, struct shd_err *e);

/* path: the socket it answered at; its directory is the runtime directory. SHD_EAUTH names both
 * sides. */
int admit_daemon(const struct side_peer *peer, const char *path, struct shd_err *e);

#endif
