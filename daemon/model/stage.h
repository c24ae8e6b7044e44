/* A session's stage: host memory into which a unit's array is copied for it to read. One for all
 * its models, as large as the largest slice it has asked for; it goes with the session. Happy path:
 * made on libuv's pool where there is none that is large enough, then a copy on the device, then
 * the answer with a ticket. Loop thread. */
#ifndef SHD_STAGE_H
#define SHD_STAGE_H

struct op;
struct session;
struct stage;

/* GET of what op->model has, between two steps: what is queued before the next one is of this one.
 * Its reply names the step already. SHD_EBUSY, with retry_ms: the stage is in use. */
int stage_get(struct op *op);

void stage_end(struct session *s);

#endif
