/* A step pinned for this session's model: see client/shd.h, daemon/model/pin.h.
 *
 * Happy path: all owners are asked for the step that the furthest of them is at; each answers when
 * it has all of it, with a segment, which is mapped beside the others' as the published ones are.
 * An owner whose step has moved on meanwhile says so: then all are asked for one a little ahead of
 * the furthest, further each time; what they have made for the question before serves for the next.
 * One that died since it answered is asked again, with the others. */
#ifndef SHD_CLIENT_PIN_H
#define SHD_CLIENT_PIN_H

struct shd_model;

/* The model is closed. Nothing pinned: a no-op. */
void pin_close(struct shd_model *m);

#endif
