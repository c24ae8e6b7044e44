/* A daemon was succeeded: what this session has open is opened on the successor. */
#ifndef SHD_REOPEN_H
#define SHD_REOPEN_H

#include "client/session/link.h"

/* hub->look and hub->reopen. ctx: the session. */
void reopen_look(void *ctx);
int reopen_models(void *ctx, struct link *link, struct shd_err *e);

#endif
