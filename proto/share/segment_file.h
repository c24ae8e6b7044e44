/* Segments on files: a region behind a descriptor as every segment is (segment.h), whose bytes lie
 * on a file system instead of in memory. For what only its maker maps: state, snapshots; and, lent,
 * for what workers read: publish.
 *
 * The file has no name (O_TMPFILE; where the file system has none of these it is made and unlinked
 * at once), so it goes with its last descriptor and nothing is left on the disk. All of its blocks
 * are taken before it is mapped: a disk that is full is an error with the numbers here, and no
 * SIGBUS in a kernel later.
 *
 * A memfd's size is fixed by seals; a file has none. Nobody can open one that has no name, but who
 * holds its descriptor, or may look into /proc/PID/fd of a process that does: its user and root,
 * who could stop that process as well. So a successor that is handed one checks what it is: a
 * regular file of its own user without a name, for nobody else, opened to read and write, as large
 * as it should be, with all its blocks.
 *
 * What is lent has a descriptor that only reads, and a mode by which nobody opens it anew to write.
 * That holds for other users. A process of its own user may give the file another mode, and its
 * maker may cut it, which a memfd's seals forbid: who reads trusts the daemon with that, as it does
 * with the values. Where files can share blocks (XFS, btrfs) who reads may clone it: what is
 * written then needs blocks anew, of which a full disk has none.
 *
 * Failure modes: DIR is missing, is none, cannot be written to, is mounted read-only, is full, or
 * its file system cannot take blocks beforehand (NFS before 4.2, ZFS): errors that name it. A disk
 * that fails is not one: the process that touches what cannot be read or written is ended by
 * SIGBUS. The kernel's writing back of pages that were changed reports to nobody.
 */
#ifndef SHD_SEGMENT_FILE_H
#define SHD_SEGMENT_FILE_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"
#include "proto/share/segment.h"

#define SEGMENT_DIR_BYTES 512u

/* Where segments of a kind are made. */
struct segment_home {
    bool file;                   /* else in memory */
    char dir[SEGMENT_DIR_BYTES]; /* absolute */
};

/* "memory", or "file:DIR" with an absolute DIR. flag: the option's name, for the error. Errors:
 * SHD_EINVAL. */
int segment_home_parse(const char *flag, const char *text, struct segment_home *ret_home,
                       struct shd_err *e);

/* Whether a segment could be made there, by making a small one. *ret_volatile: its file system is
 * memory itself (tmpfs). Errors: as of segment_file_new(). */
int segment_home_check(const struct segment_home *home, bool *ret_volatile, struct shd_err *e);

/* Create a zeroed segment on a file in dir and map it read-write here. bytes > 0 is rounded up to
 * whole pages. Takes as long as the file system needs to find so many blocks. Errors: SHD_EINVAL,
 * SHD_EAUTH, SHD_ENOMEM (no room: what is asked for and what is free), SHD_ENOTSUP, SHD_EIO. */
int segment_file_new(const char *dir, enum segment_kind kind, uint64_t bytes,
                     struct segment *ret_segment, struct shd_err *e);

/* The first half of it: a file as above that is not mapped, to be kept until somebody lends it.
 * *ret_fd: owned. Errors: the same. */
int segment_file_room(const char *dir, enum segment_kind kind, uint64_t bytes, int *ret_fd,
                      struct shd_err *e);

/* Lend such a file, one's own or a predecessor's: map it read-write here, and have a descriptor
 * that only reads from now on. kind: what outsiders read. Takes fd on success only. Errors:
 * SHD_ESEGMENT it is none, with the values; SHD_ENOMEM, SHD_EIO. */
int segment_file_lend(int fd, enum segment_kind kind, uint64_t bytes, struct segment *ret_segment,
                      struct shd_err *e);

/* Check a descriptor received from a peer: a memfd as segment_check() wants it or, where the kind
 * may be lent, a file of exactly `bytes` bytes without a name, with all its blocks, that nobody but
 * its user may open and that is open to read. Errors: SHD_ESEGMENT with the values. */
int segment_shared_check(int fd, enum segment_kind kind, uint64_t bytes, struct shd_err *e);

/* Whether a descriptor that segment_shared_check() has passed is of a file. */
bool segment_file_is(int fd);

/* Check a descriptor that a predecessor has left: a memfd as segment_check() wants it, or a file of
 * exactly `bytes` bytes as above. *ret_file: which. Errors: SHD_ESEGMENT with the values. */
int segment_kept_check(int fd, enum segment_kind kind, uint64_t bytes, bool *ret_file,
                       struct shd_err *e);

/* The same, and map it, as segment_map() does. */
int segment_kept_map(int fd, enum segment_kind kind, uint64_t bytes, struct segment *ret_segment,
                     struct shd_err *e);

#endif
