/* Owners that are daemons of this host. */
#ifndef SHD_REMOTE_H
#define SHD_REMOTE_H

#include "client/paths/path.h"
#include "client/session/blame.h"
#include "client/session/link.h"

extern const struct control_ops control_remote;

/* hub->look and hub->reopen: a successor gets open what this session has open. ctx: the session. */
void reopen_look(void *ctx);
int reopen_models(void *ctx, struct link *link, struct shd_err *e);

/* s->hub is new: have it do so, and look into its waits. Errors: SHD_ENOMEM. */
int remote_attach(struct shd_session *s, struct blame_sink sink, struct shd_err *e);

#endif
