/* The relay in a daemon's stead: the segments of one session, which the worker maps as the
 * daemon's.
 *
 *   inbox, stage, spec   memory of this session's own, made when the other relay says that the
 * daemon has one; what is in it is sent with the request that hands it over, or received before the
 * reply that does publish, board       the mirror's (mirror.h)
 *
 * Of one thread. */
#ifndef SHD_RELAY_COPIES_H
#define SHD_RELAY_COPIES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/share/segment.h"

struct bulk;
struct bulk_head;
struct held;
struct mirror;
struct relay;
struct shardmap;
struct traffic;
struct wire_layout;
struct wire_request;

#define COPIES_SEGMENTS_MAX 16u
#define COPIES_MODELS_MAX   8u

struct copy {
    struct segment segment; /* owned; fd -1: none */
    enum segment_kind kind;
    uint64_t number; /* what both relays call it */
    uint64_t ticket; /* the last one under which it may be claimed */
};

struct copies_model {
    struct mirror *mirror;   /* a reference; NULL: none */
    struct shardmap *map;    /* owned */
    struct traffic *traffic; /* borrowed; NULL: not counted */
    uint32_t handle, slots;
    uint64_t inbox; /* number; 0: it has none */
    uint64_t publish_ticket, board_ticket, publish_bytes, board_bytes;
};

struct copies {
    struct copy segments[COPIES_SEGMENTS_MAX];
    struct copies_model models[COPIES_MODELS_MAX];
    uint64_t model_last;     /* models that were ever taken */
    uint64_t last_number;    /* of segments */
    uint64_t created;        /* number of the segment that a Put is in; 0: none */
    uint64_t number_in;      /* payload of SEGMENT */
    struct held *held;       /* owned: layouts whose mirror is not whole */
    uint8_t *given;          /* owned: the body that copies_next() has given */
    struct {                 /* what the request at hand is about */
        const uint8_t *from; /* borrowed; NULL: nothing */
        uint64_t number, at, bytes;
        struct traffic *traffic; /* of a gradient: where it is counted */
    } send;
};

void copies_init(struct copies *c);
void copies_free(struct copies *c);

/* Where the payload of a SEGMENT or BYTES goes. SHD_EPROTO, SHD_ERANGE. */
int copies_place(struct copies *c, const struct bulk_head *head, void **ret_to, struct shd_err *e);

/* SEGMENT has come: make it, or know it under another ticket. SHD_EPROTO, SHD_ENOMEM. */
int copies_announce(struct copies *c, const struct bulk_head *head, struct shd_err *e);

/* What the session puts is in this one from now on. */
void copies_created(struct copies *c, uint64_t ticket);

/* Keep a Layout (and its frame, which is copied) until its model's mirror is whole. Errors:
 * SHD_EPROTO it does not fit together, SHD_EBUSY too many wait, as of spec_parse() and
 * mirror_get(). */
int copies_hold(struct copies *c, struct relay *relay, const char *device,
                const struct wire_layout *layout, const uint8_t *body, size_t bytes,
                struct shd_err *e);
bool copies_holds(const struct copies *c);

/* The next one that is to be let go: its frame, borrowed until the next call. SHD_PENDING: none;
 * SHD_EGONE its mirror is dead, SHD_EPROTO it is of another size. */
int copies_next(struct copies *c, const uint8_t **ret_body, size_t *ret_bytes, struct shd_err *e);

/* SHD_EGONE: the mirror of a model that is open is dead. */
int copies_live(const struct copies *c, struct shd_err *e);

/* What the model's board says of resets: in front of a reply that depends on it. */
void copies_attempt(struct copies *c, uint32_t model, uint64_t attempt, uint64_t tried);

/* The descriptor (borrowed) of the segment with this ticket, with its size and kind; -1: none. */
int copies_claim(const struct copies *c, uint64_t ticket, uint64_t *ret_bytes, uint32_t *ret_kind);

/* Find what this request hands over; copies_send() sends it. Errors: SHD_ENOENT, SHD_ERANGE. */
int copies_find(struct copies *c, const struct wire_request *request, struct shd_err *e);
int copies_send(struct copies *c, struct bulk *bulk, struct shd_err *e);

#endif
