/* The watchdog over what a run started: whoever hangs is killed, and started again like any other
 * that died (revive.h). It looks WATCHDOG_LOOKS times in --watchdog seconds, and so many looks in a
 * row must find the same.
 *
 *     daemon   was ready and has not said WATCHDOG=1 (sd_notify(3)): its event loop or its compute
 *              threads are stuck, or it is stopped. Its memory is kept, so nothing is lost.
 *     worker   a process of its group is stopped (SIGSTOP). One that runs or sleeps is left alone,
 *              however long it takes: slow and stuck look the same from here.
 *     helper   as a worker.
 *
 * Looks are counted, not seconds: when shardctl itself was stopped, or the machine was suspended,
 * all have had as little time as it had. A process that a debugger traces is left alone.
 */
#ifndef SHD_CTL_WATCHDOG_H
#define SHD_CTL_WATCHDOG_H

#include "client/ctl/run/run_state.h"

#define WATCHDOG_S_DEFAULT 30 /* half of the 60 s after which a client gives up (client/shd.h) */
#define WATCHDOG_LOOKS     6u

/* Initialise r->watchdog, and begin to look unless it is turned off. The handle is the caller's to
 * close. */
void watchdog_init(struct run *r);

/* A daemon has said that it is well. */
void watchdog_fed(struct run_child *daemon);

#endif
