/* The arbiter of a cluster with replicas: a place all hosts can reach that keeps one *view*, which
 * hosts are out, and lets it be changed only by compare-and-swap.
 *
 * Two sides of a cut cable take each other for dead. Each may go on without the other only once
 * the other is out in the arbiter's view, and view N + 1 is made once: by the first to claim it. So
 * one side goes on, and the other reads that it is out itself.
 *
 *     arbiter_read()   → view 7: {}          both sides
 *     arbiter_claim()  → view 8: {b}         SHD_OK: one of them
 *                                            SHD_EBUSY: the other: it reads view 8, and stops
 *
 * A view never comes back: its number only rises, and whoever acted by view 7 finds 8 there.
 *
 * Kinds, by the text that names one:
 *
 *   file:DIR              a directory that all hosts have (NFS, Lustre), absolute. View N is a file
 *                         CLUSTER.N, written aside, synchronized and then given its name by
 *                         link(2), which one of many does. A missing directory is an error, and no
 *                         view 0; so is a mount point, which looks empty while nothing is mounted:
 *                         name a directory in it.
 *   etcd:URL[,URL...]/PREFIX  members of an etcd v3, asked by its HTTP gateway (http:// or
 *                         https://), the key PREFIX/CLUSTER, by transactions. By libcurl, which is
 *                         loaded then.
 *
 * Failure modes: an arbiter that is away, hangs or has lost the directory is an error of the call,
 * within ARBITER_WAIT_MS, and nobody may take hosts for out meanwhile; training that needs no
 * change goes on without it. What is malformed is refused by its name, not passed over: an older
 * view would bring back a host that is out. A claim that ended by anything but SHD_OK or SHD_EBUSY
 * may have become the view all the same: read.
 *
 * Each call is made by a thread of the arbiter's, for a file system that hangs cannot be
 * interrupted. An arbiter is one thread's at a time, and no fork's. */
#ifndef SHD_ARBITER_H
#define SHD_ARBITER_H

#include "proto/base/status.h"
#include "proto/files/arbiter_view.h"

#define ARBITER_WAIT_MS 2000u

struct arbiter;

/* Nothing is asked yet. cluster: tells clusters apart that use one place; letters, digits, '-',
 * '_', '.', no '.' in front, below ARBITER_NAME_BYTES. Errors: SHD_EINVAL a text or name that is
 * none, SHD_ERANGE too long, SHD_ENOTSUP no libcurl here, SHD_ENOMEM. */
int arbiter_open(const char *text, const char *cluster, struct arbiter **ret_arbiter,
                 struct shd_err *e);

/* A call that still hangs ends by itself later. NULL is a no-op. */
void arbiter_close(struct arbiter *a);

/* The newest view, the caller's to free. Errors: SHD_EIO, SHD_ENOENT no such directory,
 * SHD_ETIMEDOUT, SHD_EGONE nobody answers: it cannot be reached now; SHD_EAUTH; SHD_EINVAL,
 * SHD_ERANGE, SHD_EPROTO what is there is no view; SHD_ENOMEM. */
int arbiter_read(struct arbiter *a, struct arbiter_view *ret_view, struct shd_err *e);

/* Make `next` (its number is the newest one's + 1) the view. SHD_EBUSY: somebody else's was first:
 * read again. Errors also: as arbiter_read(); SHD_EINVAL `next` is no view, or the one before it
 * does not exist; SHD_ENOTSUP a file system without hard links. */
int arbiter_claim(struct arbiter *a, const struct arbiter_view *next, struct shd_err *e);

#endif
