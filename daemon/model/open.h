/* OpenModel's way: parse off the loop, find or make the model, fill it, attach the session. */
#ifndef SHD_OPEN_H
#define SHD_OPEN_H

struct daemon;
struct model;

/* Initial values of m are in: attach the session that waits for it. */
void open_model_ready(struct model *m);

/* Free what an unfinished OpenModel holds, at shutdown. */
void open_model_abandon(struct daemon *d);

#endif
