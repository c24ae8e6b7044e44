/* What a keeper says of the daemons that it cannot start, for who looks for them: DIR/keeper.down
 * beside their sockets, a line for each.
 *
 * The file is written in place by a descriptor that the keeper opened at its start: it must be
 * able to say so when descriptors have run out. A line that is read while it is written is no line.
 */
#ifndef SHD_CTL_DOWN_NOTE_H
#define SHD_CTL_DOWN_NOTE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"

#define DOWN_NOTE_FILE           "keeper.down" /* not DEVICE.*: those are daemons' */
#define DOWN_NOTE_WHY_BYTES      160u
#define DOWN_NOTE_BYTES          320u /* a line, or its text */
#define DOWN_NOTE_FILE_BYTES_MAX ((size_t)64 * 1024)

struct down_note {
    uint64_t since_ns, next_ns; /* by clock_now_ns(); next_ns 0: it is being tried */
    uint32_t tries, kept;       /* so far; segments of its state that the keeper has */
    char why[DOWN_NOTE_WHY_BYTES];
};

/* Make the file, empty; -1 when that is impossible. The caller's to close. */
int down_note_open(const char *dir);

/* Append the note of a device to text[bytes], used bytes of which are; returns what is used then.
 * What has no room is left out. */
size_t down_note_add(char *text, size_t bytes, size_t used, const char *device,
                     const struct down_note *note);

/* Make text what the file says. A file that cannot be written keeps what it said. */
void down_note_write(int fd, const char *text, size_t bytes);

/* The note of a device; false when there is none, or a keeper left it that is no more. */
bool down_note_read(const char *dir, const char *device, struct down_note *ret_note);

/* "WHY; not started for 42 s (9 tries), the next in 12 s; its state is kept (3 segments)".
 * buf[DOWN_NOTE_BYTES]; returns buf. */
const char *down_note_text(const struct down_note *note, uint64_t now_ns, char *buf);

#endif
