/* A trainer that is attached all along while others misbehave, and must not notice: of the model of
 * tests/lib/raw_client.h, on one daemon. */
#ifndef SHD_TESTS_BYSTANDER_H
#define SHD_TESTS_BYSTANDER_H

#include "client/shd.h"
#include "tests/lib/raw_client.h"

extern shd_session *trainer;
extern shd_model *model;

void trainer_start(void); /* and the daemon */

void trainer_step(void);

void trainer_stop(uint64_t steps); /* so many were taken; ends the daemon, too */

#endif
