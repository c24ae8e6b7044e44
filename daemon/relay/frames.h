/* What two relays say to each other: types of frames (bulk.h), and which requests pass.
 *
 * The relay that stands in for a daemon dials, one connection for each session of a worker and one
 * for each model that it mirrors; the one beside the daemon answers. Both kinds begin with OPEN. */
#ifndef SHD_RELAY_FRAMES_H
#define SHD_RELAY_FRAMES_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/relay/bulk.h"
#include "proto/wire/wire.h"

enum frame_type {
    FRAME_OPEN = 1, /* index: frame_what; id: owner << 32 | owners; payload: struct frame_open */
    FRAME_REFUSED,  /* payload: why, text without NUL; the connection ends */
    /* Of a session */
    FRAME_SIDE,    /* payload: a side_msg of the daemon, its welcome or its last words */
    FRAME_MESSAGE, /* payload: a request, or a reply */
    FRAME_SEGMENT, /* there is one; index: its kind; id: its ticket; at: its bytes */
    FRAME_BYTES,   /* id: of a segment; at: where in it; payload: what is there now */
    /* Of a model; what the board has (proto/share/board.h) in the order in which it is to be stored
     */
    FRAME_MODEL,   /* index: units; id: instance; at: bytes of publish */
    FRAME_UNIT,    /* index: unit; at: where in publish; payload: its slice, perhaps torn */
    FRAME_VERSION, /* index: unit; id: version that its slice has, whole */
    FRAME_STATE,   /* index: phase; id: step */
    FRAME_ATTEMPT, /* id: attempt; at: the step of which it was said. Of a session as well: index is
                    * the model's handle */
    FRAME_FILLED,  /* every unit has been there once */
    FRAME_REWOUND, /* nothing of any unit can be read from here on; id: the attempt that began with
                    * the last rewind; at: where that went; id 0: that is still to come */
};

enum frame_what { FRAME_OPEN_SESSION = 1, FRAME_OPEN_MODEL = 2 };

struct frame_open { /* as bytes; both terminated */
    char device[64];
    char model[WIRE_NAME_BYTES_MAX];
};

/* Whether a name can be a device's: no path is made of another one. */
int frame_check_device(const char *name, struct shd_err *e);

/* Whether a worker of another host may ask this. What works on a daemon as such or on memory that
 * is not passed on does not pass: SHD_ENOTSUP, with the request's name; SHD_EAUTH a role that is
 * neither trainer nor reader, or, without `files`, what is about files of the daemon's host. Both
 * relays look, the one beside the daemon because it cannot know what the other one is. */
int frame_admits(const struct wire_request *request, bool files, struct shd_err *e);

/* The request is about files of the daemon's host. */
bool frame_is_of_files(const struct wire_request *request);

/* Send text as the reason for the connection's end. */
void frame_refuse(struct bulk *bulk, const struct shd_err *why);

#endif
