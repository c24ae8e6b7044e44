/* shardctl plan: what a policy will do to a model, and cost, before it is run. */
#ifndef SHD_CTL_PLAN_H
#define SHD_CTL_PLAN_H

/* argv[0] is the verb. Returns the exit code (base/say.h). */
int verb_plan(int argc, char **argv);

#endif
