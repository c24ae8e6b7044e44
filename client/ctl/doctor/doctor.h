/* shardctl doctor: checks of this host, by area; doctor.c has the table of them. */
#ifndef SHD_CTL_DOCTOR_H
#define SHD_CTL_DOCTOR_H

/* argv[0] is the verb. Returns the exit code (base/say.h). */
int verb_doctor(int argc, char **argv);

#endif
