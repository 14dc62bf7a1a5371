"""Attacks: what malicious clients do to their data or to their uploads."""

from feddkd.rounds.attacks.of_data import backdoor as backdoor
from feddkd.rounds.attacks.of_data import label_flip as label_flip
from feddkd.rounds.attacks.of_uploads import gaussian as gaussian
from feddkd.rounds.attacks.of_uploads import scaling as scaling
from feddkd.rounds.attacks.of_uploads import sign_flip as sign_flip
from feddkd.rounds.attacks.rule import ATTACKS as ATTACKS
from feddkd.rounds.attacks.rule import NO_ATTACK as NO_ATTACK
from feddkd.rounds.attacks.rule import Attack as Attack
from feddkd.rounds.attacks.rule import find_attack as find_attack
